"""Bad input gets a status or message that says what was wrong, and the node goes on."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import grpc
import pytest
from tests.integration.raw import (
    HALVES,
    LAYOUT,
    TIMEOUT_S,
    UNIT_BYTES,
    RawSession,
    assert_invalid,
    assert_no_leaked_slots,
    assert_nothing_held,
    assert_serves,
    chain_of,
    keys_of,
    refusal,
    statistics,
    u16,
    u32,
    wait_until,
)
from tests.nodes import NodeProcess

from octavo_proto import limits
from octavo_proto.layout import Layout
from octavo_proto.v1 import cache_pb2

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


# Columns


def test_keys_that_are_no_multiple_of_16_are_refused(session: RawSession) -> None:
    chain = cache_pb2.Chain(keys=b"x" * 17)
    calls: list[Callable[[], Any]] = [
        lambda: session.match(chain),
        lambda: session.reserve(chain),
        lambda: list(session.get(chain)),
    ]
    for call in calls:
        assert_invalid(call, "chain.keys has 17 bytes", "multiple of 16")
    request = cache_pb2.DeleteRequest(session_id=session.session_id, chain=chain)
    assert_invalid(lambda: session.cache.Delete(request, timeout=TIMEOUT_S), "17 bytes")


def test_a_parent_key_of_another_length_is_refused(session: RawSession) -> None:
    chain = chain_of("parent", 1, parent_key=b"short")
    assert_invalid(lambda: session.reserve(chain), "parent_key has 5 bytes, must have 16")


def test_a_chain_longer_than_allowed_is_refused(session: RawSession) -> None:
    pages = session.opened.limits.chain_pages_max + 1
    chain = cache_pb2.Chain(keys=bytes(16 * pages))
    assert_invalid(lambda: session.match(chain), f"{pages} pages", "at most")


def test_the_longest_chain_is_answered(session: RawSession) -> None:
    chain = chain_of("long", session.opened.limits.chain_pages_max)
    assert session.match(chain).page_count == 0


def test_a_key_twice_in_a_chain_is_refused(session: RawSession) -> None:
    chain = cache_pb2.Chain(keys=keys_of("twice", 3) + keys_of("twice", 1))
    assert_invalid(lambda: session.reserve(chain), "pages 0 and 3 have the same key")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"unit_lengths": b"abc"}, ["unit_lengths has 3 bytes", "multiple of 4"]),
        ({"unit_lengths": u32(1, 2, 3)}, ["unit_lengths has 3 rows", "must have 1, 2 or 2"]),
        ({"unit_lengths": b""}, ["unit_lengths has"]),
        ({"unit_lengths": u32(0)}, ["a unit of 0 bytes"]),
        ({"variants": b"a"}, ["variants has 1 bytes"]),
        ({"variants": u16(1, 1, 1)}, ["variants has 3 rows"]),
        ({"variants": u16(0)}, ["0 is no variant"]),
        ({"positions": b"abc"}, ["positions has 3 bytes"]),
        ({"positions": u32(0, 2)}, ["positions names page 2, the chain has 2"]),
        ({"positions": u32(1, 0)}, ["positions must ascend"]),
        ({"positions": u32(1, 1)}, ["positions must ascend"]),
        ({"positions": u32(1), "variants": u16(1, 1)}, ["variants has 2 rows, must have 1 or 1"]),
        ({"unit_mask": 0b10}, ["unit_mask is 0x2", "'small' has 1 units"]),
        ({"unit_mask": 2**64 - 1}, ["unit_mask"]),
    ],
)
def test_columns_of_a_reserve_that_contradict_the_chain_are_refused(
    session: RawSession, fields: dict[str, Any], words: list[str]
) -> None:
    request = cache_pb2.ReserveRequest(session_id=session.session_id, chain=chain_of("columns", 2))
    request.unit_lengths, request.variants = u32(UNIT_BYTES), u16(1)
    for name, value in fields.items():
        setattr(request, name, value)
    assert_invalid(lambda: session.cache.Reserve(request, timeout=TIMEOUT_S), *words)


@pytest.mark.parametrize("column", ["lease_ids", "hold_ids", "reservation_ids"])
def test_id_columns_of_half_an_id_are_refused(session: RawSession, column: str) -> None:
    renew = cache_pb2.RenewRequest(session_id=session.session_id)
    setattr(renew, column, b"1234567")
    assert_invalid(lambda: session.cache.Renew(renew, timeout=TIMEOUT_S), f"{column} has 7 bytes")


def test_more_ids_than_anybody_can_hold_are_refused(session: RawSession) -> None:
    too_many = bytes(8 * 65_537)
    release = cache_pb2.ReleaseRequest(session_id=session.session_id, lease_ids=too_many)
    assert_invalid(
        lambda: session.cache.Release(release, timeout=TIMEOUT_S), "lease_ids has 65537 rows"
    )


# Names and numbers


def test_places_beyond_the_sessions_lists_are_refused(session: RawSession) -> None:
    for index in (1, 2**31, 2**32 - 1):
        chain = chain_of("places", 1, namespace_index=index)
        assert_invalid(partial(session.match, chain), f"namespace_index is {index}")
    for index in (2, 2**32 - 1):
        chain = chain_of("places", 1, layout=index)
        assert_invalid(partial(session.match, chain), f"layout_index is {index}")
    clear = cache_pb2.ClearRequest(session_id=session.session_id, namespace_index=7)
    assert_invalid(lambda: session.cache.Clear(clear, timeout=TIMEOUT_S), "namespace_index is 7")
    clear = cache_pb2.ClearRequest(session_id=session.session_id, layout_fingerprint=b"?" * 16)
    assert_invalid(lambda: session.cache.Clear(clear, timeout=TIMEOUT_S), "layout_fingerprint")


def test_a_get_beyond_its_chain_or_without_delivery_is_refused(session: RawSession) -> None:
    chain = chain_of("get", 2)
    assert_invalid(lambda: list(session.get(chain, first_position=3)), "first_position is 3")
    assert_invalid(lambda: list(session.get(chain, first_position=2**32 - 1)), "first_position")
    assert_invalid(lambda: list(session.get(chain, unit_mask=1 << 63)), "unit_mask")
    assert_invalid(lambda: list(session.get(chain, delivery=9)), "delivery is 9")
    request = cache_pb2.GetRequest(session_id=session.session_id, chain=chain)
    assert_invalid(lambda: list(session.cache.Get(request, timeout=TIMEOUT_S)), "delivery is 0")
    assert_invalid(
        lambda: list(session.get(chain, delivery=cache_pb2.DELIVERY_GRANTS)),
        "never connected",
    )
    assert session.fetch(chain, first_position=2) == []


def test_absurd_durations_are_cut_to_the_limit(session: RawSession) -> None:
    chain = chain_of("absurd", 1)
    session.store(chain)
    found = session.match(chain, hold=True, hold_ms=2**32 - 1)
    assert found.hold_ms == session.opened.limits.hold_ms_max
    reserved = session.reserve(chain_of("absurd 2", 1), reservation_ms=2**32 - 1)
    assert reserved.reservation_ms == session.opened.limits.reservation_ms_max


@pytest.mark.parametrize("session_id", [b"", b"x", b"x" * 16, b"x" * 1000])
def test_a_session_that_is_none_is_refused(session: RawSession, session_id: bytes) -> None:
    cache = session.cache
    header = cache_pb2.PutHeader(session_id=session_id)
    calls: list[Callable[[], Any]] = [
        lambda: cache.Match(cache_pb2.MatchRequest(session_id=session_id)),
        lambda: list(cache.Get(cache_pb2.GetRequest(session_id=session_id))),
        lambda: cache.Release(cache_pb2.ReleaseRequest(session_id=session_id)),
        lambda: cache.Renew(cache_pb2.RenewRequest(session_id=session_id)),
        lambda: cache.Reserve(cache_pb2.ReserveRequest(session_id=session_id)),
        lambda: cache.Commit(cache_pb2.CommitRequest(session_id=session_id)),
        lambda: cache.Put(iter([cache_pb2.PutRequest(header=header)])),
        lambda: cache.Abort(cache_pb2.AbortRequest(session_id=session_id)),
        lambda: cache.Delete(cache_pb2.DeleteRequest(session_id=session_id)),
        lambda: cache.Clear(cache_pb2.ClearRequest(session_id=session_id)),
        lambda: cache.Flush(cache_pb2.FlushRequest(session_id=session_id)),
        lambda: cache.CloseSession(cache_pb2.CloseSessionRequest(session_id=session_id)),
    ]
    for call in calls:
        code, message = refusal(call)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "unknown session" in message


def test_a_message_above_the_limit_is_refused_and_the_connection_lives(session: RawSession) -> None:
    chain = cache_pb2.Chain(keys=bytes(limits.MESSAGE_BYTES_MAX))
    code, message = refusal(lambda: session.match(chain))
    assert code is EXHAUSTED
    assert "larger than max" in message
    assert session.match(chain_of("small", 1)).page_count == 0


def test_bytes_that_are_no_message_are_refused_like_other_bad_input(session: RawSession) -> None:
    one, channel = "/octavo.v1.Cache", session.channel
    refused: list[tuple[Any, Any]] = [
        (channel.unary_unary(f"{one}/Match"), b"\xff\xff\xff"),
        (channel.unary_stream(f"{one}/Get"), b"\xff\xff"),
        (channel.stream_unary(f"{one}/Put"), iter([b"\xff\xff"])),
        (channel.unary_unary(f"{one}/OpenSession"), b"\x12\x02\xff\xfe"),  # a name not in UTF-8
        (channel.unary_unary("/grpc.health.v1.Health/Check"), b"\xff\xff"),
    ]
    for method, request in refused:
        assert_invalid(partial(_all_of, method, request), "be decoded")
    unknown = cast("Any", channel).unary_unary(f"{one}/NoSuchMethod")
    assert refusal(partial(_all_of, unknown, b""))[0] is grpc.StatusCode.UNIMPLEMENTED


def _all_of(method: Any, request: Any) -> Any:
    answer = method(request, timeout=TIMEOUT_S)
    return answer if isinstance(answer, bytes) else list(answer)


# Sessions and layouts


def layout_message(**changes: Any) -> cache_pb2.Layout:
    message = LAYOUT.to_proto()
    for name, value in changes.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"page_tokens": 17}, "page_tokens is 17"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"page_tokens": 2**32 - 1}, "page_tokens"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": 2**32 - 1}, "layers"),
        ({"kind": 0}, "kind is 0"),
        ({"kind": 77}, "kind is 77"),
        ({"dtype": "float3"}, "dtype is 'float3'"),
        ({"layer_parts": 65}, "layer_parts"),
        ({"layer_parts": 2**32 - 1, "head_parts": 2**32 - 1}, "at most 64 units"),
        ({"head_parts": 0}, "head_parts is 0"),
        ({"name": ""}, "name is ''"),
        ({"name": "n" * 257}, "name is longer than 256"),
        ({"rope": "r" * 4097}, "rope is longer than 4096"),
        ({"key_scheme": "sha1"}, "key_scheme is 'sha1'"),
        ({"weights_epoch": 2**64 - 1}, "weights_epoch"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_field(
    session: RawSession, changes: dict[str, Any], word: str
) -> None:
    request = cache_pb2.OpenSessionRequest(layouts=[layout_message(**changes)])
    assert_invalid(lambda: session.cache.OpenSession(request, timeout=TIMEOUT_S), word)


def test_another_layout_under_a_known_name_is_refused_by_field(session: RawSession) -> None:
    request = cache_pb2.OpenSessionRequest(layouts=[layout_message(rope="base=1e6")])
    code, message = refusal(lambda: session.cache.OpenSession(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "'small'" in message
    assert "rope" in message


def test_a_fingerprint_that_differs_is_refused_loudly(session: RawSession) -> None:
    request = cache_pb2.OpenSessionRequest(layouts=[LAYOUT.to_proto()])
    request.layout_fingerprints = b"f" * 16
    code, message = refusal(lambda: session.cache.OpenSession(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert (b"f" * 16).hex() in message
    assert LAYOUT.fingerprint().hex() in message


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"namespaces": [""]}, "is no name"),
        ({"namespaces": ["a", "a"]}, "a name twice"),
        ({"namespaces": ["n" * 257]}, "is no name"),
        ({"namespaces": ["line\nbreak"]}, "is no name"),
        ({"namespaces": [f"n{i}" for i in range(65)]}, "namespaces has 65 names"),
        ({"variants": [0]}, "variants: 0"),
        ({"variants": [65_536]}, "variants: 65536"),
        ({"variants": list(range(1, 66))}, "variants has 65 entries"),
        ({"layout_fingerprints": b"x" * 15}, "layout_fingerprints has 15 bytes"),
        ({"layout_fingerprints": b"x" * 16}, "1 rows for 0 layouts"),
    ],
)
def test_senseless_session_terms_are_refused(
    session: RawSession, fields: dict[str, Any], word: str
) -> None:
    request = cache_pb2.OpenSessionRequest(**fields)
    assert_invalid(lambda: session.cache.OpenSession(request, timeout=TIMEOUT_S), word)


def test_too_many_layouts_are_refused(session: RawSession) -> None:
    request = cache_pb2.OpenSessionRequest(
        layouts=[layout_message(name=f"l{i}") for i in range(17)]
    )
    assert_invalid(lambda: session.cache.OpenSession(request, timeout=TIMEOUT_S), "17 entries")


def test_sessions_are_bounded_and_the_next_one_fits_when_one_ends(node: NodeProcess) -> None:
    open_before = int(statistics(node).gauges["sessions"])
    opened = [RawSession(node.address) for _ in range(24 - open_before)]
    try:
        code, message = refusal(lambda: RawSession(node.address))
        assert code is EXHAUSTED
        assert "24 sessions" in message
        opened.pop().close()
        opened.append(RawSession(node.address))
    finally:
        for session in opened:
            session.close()
    assert_serves(node, "sessions")


# The broker


def ticket_answer(path: str, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(path)
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(64)
        except ConnectionError:  # hung up on us before it had read everything
            return b""


def test_the_broker_gives_nothing_for_a_wrong_short_or_used_ticket(node: NodeProcess) -> None:
    with RawSession(node.address, attach=True) as session:
        shared = session.opened.shared_memory
        assert ticket_answer(shared.broker_path, b"") == b""
        assert ticket_answer(shared.broker_path, b"short") == b""
        assert ticket_answer(shared.broker_path, b"w" * 16) == b""
        assert ticket_answer(shared.broker_path, b"w" * 100_000) == b""
        assert ticket_answer(shared.broker_path, shared.ticket) == b""
        session.store(chain_of("broker", 1))
        session.close()
    assert_serves(node, "broker")


def test_the_broker_outlives_a_lack_of_descriptors(node: NodeProcess) -> None:
    with RawSession(node.address, attach=True) as session:
        path = session.opened.shared_memory.broker_path
        before = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        connections = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        try:
            resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (4, before[1]))
            for connection in connections:
                connection.connect(path)
            time.sleep(0.3)
        finally:
            resource.prlimit(node.pid, resource.RLIMIT_NOFILE, before)
            for connection in connections:
                connection.close()
        session.close()

    def attaches() -> bool:
        with RawSession(node.address, attach=True) as again:
            again.close()
        return True

    wait_until("workers attach again", attaches)
    assert not statistics(node).problems
    assert_serves(node, "descriptors")


def test_after_all_of_this_no_slot_is_lost(node: NodeProcess) -> None:
    assert_nothing_held(node)
    assert_no_leaked_slots(node)
    log = node.log.read_text()
    assert "Traceback" not in log, log[-4000:]


def test_layouts_of_these_tests_are_what_they_say() -> None:
    assert LAYOUT.raw_unit_bytes(0) == UNIT_BYTES
    assert [HALVES.raw_unit_bytes(unit) for unit in (0, 1)] == [UNIT_BYTES] * 2
    assert isinstance(LAYOUT, Layout)
