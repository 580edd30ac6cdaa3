"""Random and mutated requests to a real node: it refuses or serves, and nothing else."""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter, deque
from pathlib import Path
from typing import Any, Final, cast

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.integration.raw import (
    HALVES,
    LAYOUT,
    RawSession,
    assert_no_leaked_slots,
    assert_nothing_held,
    assert_serves,
    statistics,
    u64,
    wait_until,
)
from tests.integration.requests import METHODS, NAMESPACES, SESSION_REFS, Sent, stories
from tests.nodes import NodeProcess

from octavo_proto import columns
from octavo_proto.keys import digest_seed, unit_digest
from octavo_proto.v1 import cache_pb2

Code = grpc.StatusCode
FINE: Final = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED,
    Code.FAILED_PRECONDITION,
    Code.RESOURCE_EXHAUSTED,
}
SESSIONS_MAX: Final = 64
MUST_HAVE_HAPPENED: Final = (
    "put_pages_stored",
    "get_bytes",
    "leases_granted",
    "holds_granted",
    "deleted_pages",
    "memory_evicted_pages",
)
"""A fuzz that never came so far would prove little."""


class Fuzzer:
    """Sends calls, and keeps what the node answered in mind for the next ones."""

    def __init__(self, node: NodeProcess) -> None:
        self.node = node
        self.sessions = [self._open(attach=number != 2) for number in range(len(SESSION_REFS))]
        self.ids: deque[int] = deque([1], maxlen=8)
        self.codes: Counter[tuple[str, str]] = Counter()
        self.channel: Any = grpc.insecure_channel(node.address)

    def _open(self, *, attach: bool) -> RawSession:
        return RawSession(self.node.address, namespaces=list(NAMESPACES), attach=attach)

    def send(self, sent: Sent) -> None:
        kind, request_type = METHODS[sent.method]
        messages = [self._with_real_ids(request_type, data) for data in sent.messages]
        call = getattr(self.channel, kind)(f"/octavo.v1.Cache/{sent.method}")
        request = iter(messages) if kind == "stream_unary" else messages[0]
        code, details = Code.OK, "it was answered"
        try:
            answer = call(request, timeout=10)
            answers = list(answer) if kind == "unary_stream" else [answer]
        except grpc.RpcError as error:
            answers = []
            code, details = cast("grpc.Call", error).code(), cast("grpc.Call", error).details()
        assert code in FINE, f"{sent}: {code.name}: {details}"
        assert details, f"{sent}: {code.name} without a message"
        if answers:
            self._learn(sent.method, messages, answers)
        self.codes[sent.method, code.name] += 1

    def close(self) -> None:
        for session in self.sessions:
            session.hang_up()
        self.channel.close()

    def _with_real_ids(self, request_type: Any, data: bytes) -> bytes:
        try:
            request = request_type.FromString(data)
        except Exception:  # noqa: BLE001 - DecodeError, or what protobuf raises instead: stays random
            return data
        holders = [request, getattr(request, "header", None)]
        for holder in holders:
            if holder is None or (holder is not request and not request.HasField("header")):
                continue
            ref: bytes = getattr(holder, "session_id", b"")
            if ref in SESSION_REFS:
                holder.session_id = self.sessions[ref[0]].session_id
            for name in ("reservation_id", "hold_id"):
                number = getattr(holder, name, 0)
                if 0 < number <= len(self.ids):
                    setattr(holder, name, self.ids[-number])
        for name in ("lease_ids", "hold_ids", "reservation_ids"):
            column = getattr(request, name, b"")
            if column and len(column) % 8 == 0:
                numbers = columns.read(name, column, columns.U64).tolist()
                real = [self.ids[-n] if 0 < n <= len(self.ids) else n for n in numbers]
                setattr(request, name, u64(*real))
        return bytes(request.SerializeToString())

    def _learn(self, method: str, requests: list[bytes], answers: list[bytes]) -> None:
        if method == "CloseSession":
            for place, session in enumerate(self.sessions):
                if session.session_id in requests[0]:
                    session.hang_up()
                    self.sessions[place] = self._open(attach=place != 2)
        elif method == "OpenSession":
            self._close(cache_pb2.OpenSessionResponse.FromString(answers[0]).session_id)
        elif method == "Match":
            self.ids.append(cache_pb2.MatchResponse.FromString(answers[0]).hold_id or 1)
        elif method == "Reserve":
            reserved = cache_pb2.ReserveResponse.FromString(answers[0])
            self.ids.append(reserved.reservation_id or 1)
        elif method == "Get":
            self._check_get(cache_pb2.GetRequest.FromString(requests[0]), answers)

    def _check_get(self, request: cache_pb2.GetRequest, answers: list[bytes]) -> None:
        """Whole units arrive, and their digests are those of their keys."""
        data = bytearray()
        responses = [cache_pb2.GetResponse.FromString(answer) for answer in answers]
        for response in responses:
            if response.HasField("grants"):
                self.ids.append(response.grants.lease_id)
            if response.HasField("data") and not request.hold_id:
                piece = response.data
                assert piece.offset == len(data)
                data += piece.data
                if piece.last:
                    at = piece.position * 16
                    layout = (LAYOUT, HALVES)[request.chain.layout_index]
                    expected = digest_seed(
                        request.chain.keys[at : at + 16],
                        layout.fingerprint(),
                        piece.unit,
                        piece.variant,
                        piece.length,
                    )
                    assert len(data) == piece.length
                    assert unit_digest(bytes(data), expected) == piece.digest
                    data.clear()
        assert responses[-1].HasField("outcome"), "a stream without an outcome"

    def _close(self, session_id: bytes) -> None:
        request = cache_pb2.CloseSessionRequest(session_id=session_id)
        self.sessions[0].cache.CloseSession(request, timeout=10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fuzz(directory: Path, example_count: int, chosen_seed: int | None) -> Counter[tuple[str, str]]:
    """Runs the fuzz on a node of its own and holds the node to its promises."""
    http = f"127.0.0.1:{free_port()}"
    with NodeProcess(
        directory,
        http=http,
        memory_bytes="1MiB",
        staging_ring_bytes="1MiB",
        nvme_dir=directory / "nvme",
        nvme_bytes="1MiB",
        sessions_max=SESSIONS_MAX,
        session_leases_max=32,
        session_holds_max=4,
        session_reservations_max=4,
        lease_s=1,
        hold_s=1,
        reservation_s=1,
    ) as node:
        fuzzer = Fuzzer(node)

        @settings(
            max_examples=example_count,
            derandomize=chosen_seed is None,
            database=None,
            deadline=None,
            phases=[Phase.generate],  # the node's state makes an example: nothing to shrink
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(st.lists(stories(), min_size=5, max_size=10))
        def send_all(sequence: list[list[Sent]]) -> None:
            for story in sequence:
                for sent in story:
                    fuzzer.send(sent)

        if chosen_seed is not None:
            send_all = seed(chosen_seed)(send_all)
        try:
            send_all()
        except BaseException:
            print(node.log.read_text()[-8000:])
            raise
        fuzzer.close()
        counters = statistics(node).counters
        print(dict(counters), dict(fuzzer.codes))
        for name in MUST_HAVE_HAPPENED:
            assert counters[name], f"the fuzz never reached {name}: {counters}"
        assert_nothing_held(node, within_s=10)
        assert node.http_json(http, "/healthz")["healthy"] is True
        assert not statistics(node).problems
        assert_no_leaked_slots(node, NAMESPACES)
        assert_serves(node, "after the fuzz")
        log = node.log.read_text()
        assert "Traceback" not in log, log[-4000:]
        wait_until("few sessions", lambda: statistics(node).gauges["sessions"] < SESSIONS_MAX)
        return fuzzer.codes


def test_no_request_makes_a_node_fail_leak_or_serve_wrong_bytes(tmp_path: Path) -> None:
    codes = fuzz(tmp_path, 300, None)
    for method in METHODS:  # a fuzz whose requests were all refused would prove little
        assert codes[method, "OK"], f"{method}: {codes}"
    for code in (Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED):
        assert any(name == code.name for _, name in codes), f"{code}: {codes}"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_no_request_makes_a_node_fail_with_another_seed_each_time(tmp_path: Path) -> None:
    chosen = int(os.environ.get("OCTAVO_FUZZ_SEED") or secrets.randbits(32))
    print(f"seed {chosen}: repeat with OCTAVO_FUZZ_SEED={chosen}")
    fuzz(tmp_path, 2000, chosen)
