"""What the protocol promises beside pages: units of ranks, variants, compatibility, services."""

from __future__ import annotations

import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.integration.raw import (
    LAYOUT,
    TIMEOUT_S,
    UNIT_BYTES,
    RawSession,
    assert_nothing_held,
    chain_of,
    content_of,
    u16,
    u32,
)
from tests.nodes import NodeProcess

import octavo
from octavo_proto.layout import foreign_layout
from octavo_proto.v1 import cache_pb2

DONE, INLINE = cache_pb2.STATUS_DONE, cache_pb2.DELIVERY_INLINE
PRESENT, RESERVED = cache_pb2.STATUS_ALREADY_PRESENT, cache_pb2.STATUS_RESERVED


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node")) as running:
        yield running
        assert_nothing_held(running)
        assert "Traceback" not in running.log.read_text()


@pytest.fixture
def session(node: NodeProcess) -> Generator[RawSession]:
    with RawSession(node.address) as opened:
        yield opened
        opened.close()


def put_unit(session: RawSession, chain: cache_pb2.Chain, unit: int) -> bytes:
    """Puts one unit of each page; the statuses of the reserve."""
    reserved = session.reserve(chain, unit_mask=1 << unit)
    pieces = [
        cache_pb2.PutData(
            position=page, unit=unit, data=content_of(chain.keys[page * 16 :][:16], unit)
        )
        for page, status in enumerate(reserved.statuses)
        if status == RESERVED
    ]
    session.put(reserved.reservation_id, pieces)
    return reserved.statuses


def test_ranks_put_their_units_and_a_page_is_there_when_all_are(node: NodeProcess) -> None:
    chain = chain_of("ranks", 3, layout=1)
    with RawSession(node.address) as rank_0, RawSession(node.address) as rank_1:
        assert put_unit(rank_0, chain, 0) == bytes([RESERVED] * 3)
        assert rank_1.match(chain).page_count == 0
        assert rank_0.fetch(chain, unit_mask=1) == [cache_pb2.STATUS_MISSING] * 3
        assert put_unit(rank_1, chain, 1) == bytes([RESERVED] * 3)
        assert rank_0.match(chain).page_count == 3
        for rank, session in enumerate((rank_0, rank_1)):
            data = [r.data for r in session.get(chain, unit_mask=1 << rank) if r.HasField("data")]
            assert [(piece.position, piece.unit) for piece in data] == [
                (page, rank) for page in range(3)
            ]
        assert put_unit(rank_0, chain, 0) == bytes([PRESENT] * 3)
        rank_0.close()
        rank_1.close()


def test_two_ranks_may_reserve_the_same_page_at_once(node: NodeProcess) -> None:
    chain = chain_of("ranks at once", 1, layout=1)
    with RawSession(node.address) as rank_0, RawSession(node.address) as rank_1:
        first = rank_0.reserve(chain, unit_mask=1)
        second = rank_1.reserve(chain, unit_mask=2)
        both = rank_1.reserve(chain)
        assert list(both.statuses) == [cache_pb2.STATUS_PENDING] * 2
        for session, unit, reserved in ((rank_1, 1, second), (rank_0, 0, first)):
            assert rank_0.match(chain).page_count == 0
            piece = cache_pb2.PutData(unit=unit, data=content_of(chain.keys, unit))
            session.put(reserved.reservation_id, [piece])
        assert rank_0.fetch(chain) == [DONE]
        rank_0.close()
        rank_1.close()


def test_a_variant_is_seen_only_by_sessions_that_can_read_it(node: NodeProcess) -> None:
    chain = chain_of("variants", 1)
    with (
        RawSession(node.address, variants=[2, 1]) as both,
        RawSession(node.address, variants=[1]) as one,
    ):
        reserved = both.reserve(chain, variants=u16(2))
        both.put(reserved.reservation_id, [cache_pb2.PutData(data=content_of(chain.keys))])
        assert both.match(chain).page_count == 1
        assert one.match(chain).page_count == 0
        assert one.fetch(chain) == [cache_pb2.STATUS_MISSING]
        # What it can't read it may replace.
        one.store(chain)
        assert both.match(chain).page_count == one.match(chain).page_count == 1
        both.close()
        one.close()


def test_namespaces_do_not_see_each_other(node: NodeProcess) -> None:
    with RawSession(node.address, namespaces=["a", "b"]) as session:
        keys = [granted.key for granted in session.opened.namespaces]
        assert len(set(keys)) == 2
        chain = chain_of("namespaces", 2)
        session.store(chain)
        chain.namespace_index = 1
        assert session.match(chain).page_count == 0
        assert session.fetch(chain) == [cache_pb2.STATUS_MISSING] * 2
        delete = cache_pb2.DeleteRequest(session_id=session.session_id, chain=chain)
        assert list(session.cache.Delete(delete).statuses) == [cache_pb2.STATUS_MISSING] * 2
        clear = cache_pb2.ClearRequest(session_id=session.session_id, namespace_index=1)
        assert session.cache.Clear(clear).page_count == 0
        chain.namespace_index = 0
        assert session.match(chain).page_count == 2
        clear.namespace_index = 0
        assert session.cache.Clear(clear).page_count == 2
        assert session.match(chain).page_count == 0
        session.close()


def test_foreign_pages_of_any_size_stand_for_themselves(node: NodeProcess) -> None:
    layout = foreign_layout("objects", "elsewhere")
    chain = chain_of("foreign", 3, unlinked=True)
    with RawSession(node.address, layouts=[layout]) as session:
        reserved = session.reserve(chain, unit_lengths=u32(1, 70_000, 3))
        pieces = [
            cache_pb2.PutData(
                position=page, data=content_of(chain.keys[page * 16 :][:16], 0, length)
            )
            for page, length in ((1, 70_000), (2, 3))
        ]
        session.put(reserved.reservation_id, pieces)
        found = session.match(chain)
        assert list(found.present) == [0, 1, 1]
        assert found.page_count == 2
        assert session.fetch(chain) == [cache_pb2.STATUS_MISSING, DONE, DONE]
        session.close()


# Compatibility

NEWER = b"\xc0\x3e\x2a\xca\x3e\x05newer"  # field 1000 as a varint, field 1001 as bytes


def test_unknown_newer_fields_are_ignored(session: RawSession) -> None:
    chain = cache_pb2.Chain.FromString(chain_of("newer", 2).SerializeToString() + NEWER)
    session.store(chain)

    def call(method: str, request: Any, answer: Any) -> Any:
        send = cast("Any", session.channel).unary_unary(f"/octavo.v1.Cache/{method}")
        return answer.FromString(send(request.SerializeToString() + NEWER, timeout=TIMEOUT_S))

    session_id = session.session_id
    match = cache_pb2.MatchRequest(session_id=session_id, chain=chain)
    assert call("Match", match, cache_pb2.MatchResponse).page_count == 2
    opening = cache_pb2.OpenSessionRequest(layouts=[LAYOUT.to_proto()])
    opening.layouts[0].MergeFromString(NEWER)
    opened = call("OpenSession", opening, cache_pb2.OpenSessionResponse)
    assert opened.layout_fingerprints == LAYOUT.fingerprint()
    closing = cache_pb2.CloseSessionRequest(session_id=opened.session_id)
    call("CloseSession", closing, cache_pb2.CloseSessionResponse)
    gets = cast("Any", session.channel).unary_stream("/octavo.v1.Cache/Get")
    get = cache_pb2.GetRequest(session_id=session_id, chain=chain, delivery=INLINE)
    answers = list(gets(get.SerializeToString() + NEWER, timeout=TIMEOUT_S))
    assert list(cache_pb2.GetResponse.FromString(answers[-1]).outcome.statuses) == [DONE] * 2


def test_an_older_client_that_knows_only_what_must_be_said_is_served(node: NodeProcess) -> None:
    """No variants, no fingerprints, no namespaces, no shared memory, no durations."""
    with grpc.insecure_channel(node.address) as channel:
        send = cast("Any", channel).unary_unary("/octavo.v1.Cache/OpenSession")
        request = cache_pb2.OpenSessionRequest(layouts=[LAYOUT.to_proto()])
        answer = send(request.SerializeToString(), timeout=TIMEOUT_S)
        opened = cache_pb2.OpenSessionResponse.FromString(answer)
    assert not opened.HasField("shared_memory")
    assert [granted.name for granted in opened.namespaces] == ["default"]
    with RawSession(node.address, layouts=[LAYOUT]) as session:
        session.session_id = opened.session_id
        chain = chain_of("older", 2)
        session.store(chain)
        assert session.fetch(chain) == [DONE] * 2
        session.close()


# Services


def test_health_answers_for_the_node_and_its_services(node: NodeProcess) -> None:
    with grpc.insecure_channel(node.address) as channel:
        stub = cast("Any", health_pb2_grpc).HealthStub(channel)  # no types
        for service in ("", "octavo.v1.Cache", "octavo.v1.Admin"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=TIMEOUT_S)
        assert "NOT_FOUND" in str(unknown.value)


def test_reflection_describes_the_protocol(node: NodeProcess) -> None:
    with grpc.insecure_channel(node.address) as channel:
        stub = cast("Any", reflection_pb2_grpc).ServerReflectionStub(channel)  # no types
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="octavo.v1.Cache"),
        ]
        listed, described = stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {"octavo.v1.Cache", "octavo.v1.Admin", "grpc.health.v1.Health"} <= names
    files = [
        FileDescriptorProto.FromString(data)
        for data in described.file_descriptor_response.file_descriptor_proto
    ]
    methods = {method.name for file in files for s in file.service for method in s.method}
    assert {"Match", "Get", "Reserve", "Commit"} <= methods


@pytest.mark.parametrize(("listen_bulk", "transport"), [("auto", "bulk"), ("off", "grpc")])
def test_tcp_serves_whoever_it_was_opened_for(
    tmp_path: Path, listen_bulk: str, transport: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with NodeProcess(
        tmp_path,
        listen_tcp=f"127.0.0.1:{port}",
        listen_bulk=listen_bulk,
        allow_unauthenticated_tcp="true",
    ) as node:
        pages = np.arange(3 * UNIT_BYTES, dtype=np.uint64).astype(np.uint8)
        with octavo.Client(f"127.0.0.1:{port}", layouts=[LAYOUT]) as client:
            chain = client.chain(range(3 * LAYOUT.page_tokens))
            assert client.put(chain, octavo.BufferSource(pages, UNIT_BYTES)).stored_pages == 3
            assert client.transport_name == transport
        got = np.zeros_like(pages)
        with octavo.Client(node.address, layouts=[LAYOUT], transport="shm") as client:
            chain = client.chain(range(3 * LAYOUT.page_tokens))
            assert client.get(chain, octavo.BufferSink(got, UNIT_BYTES)).page_count == 3
        assert (got == pages).all()
        assert_nothing_held(node)
