"""Puts, leases and reservations that are wrong get a status or message, and hurt nobody."""

from __future__ import annotations

import time

import grpc
import pytest
from tests.integration.raw import (
    TIMEOUT_S,
    UNIT_BYTES,
    RawSession,
    assert_invalid,
    assert_serves,
    chain_of,
    content_of,
    refusal,
    u8,
    u32,
    u64,
)
from tests.nodes import NodeProcess

from octavo_proto.v1 import cache_pb2

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
MEMORY_BYTES = 16 << 20


# Puts


def test_a_commit_for_a_foreign_reservation_is_expired_and_changes_nothing(
    attached: RawSession, node: NodeProcess
) -> None:
    chain = chain_of("foreign", 1)
    reserved = attached.reserve(chain)
    row = {"positions": u32(0), "units": u8(0), "ring_offsets": u64(0), "lengths": u32(UNIT_BYTES)}
    with RawSession(node.address, attach=True) as other:
        assert other.commit(reserved.reservation_id, **row) == [cache_pb2.STATUS_EXPIRED]
        abort = cache_pb2.AbortRequest(
            session_id=other.session_id, reservation_id=reserved.reservation_id
        )
        assert not other.cache.Abort(abort, timeout=TIMEOUT_S).held
        piece = cache_pb2.PutData(position=0, unit=0, data=bytes(UNIT_BYTES))
        assert list(other.put(reserved.reservation_id, [piece]).statuses) == [
            cache_pb2.STATUS_EXPIRED
        ]
    assert attached.match(chain).page_count == 0
    attached.ring_write(0, content_of(chain.keys))
    assert attached.commit(reserved.reservation_id, **row) == [cache_pb2.STATUS_STORED]
    assert attached.fetch(chain) == [cache_pb2.STATUS_DONE]


def test_a_second_commit_of_a_unit_is_rejected_and_the_first_stays(attached: RawSession) -> None:
    chain = chain_of("double commit", 1)
    reserved = attached.reserve(chain)
    attached.ring_write(0, content_of(chain.keys))
    row = {"positions": u32(0), "units": u8(0), "ring_offsets": u64(0), "lengths": u32(UNIT_BYTES)}
    twice = {name: value * 2 for name, value in row.items()}
    assert_invalid(
        lambda: attached.commit(reserved.reservation_id, **twice), "2 rows", "chain has 1 units"
    )
    assert attached.commit(reserved.reservation_id, **row) == [cache_pb2.STATUS_STORED]
    attached.ring_write(0, b"\0" * UNIT_BYTES)
    assert attached.commit(reserved.reservation_id, **row) == [cache_pb2.STATUS_REJECTED]
    assert attached.fetch(chain) == [cache_pb2.STATUS_DONE]


def test_a_commit_after_the_last_one_is_expired(attached: RawSession) -> None:
    chain = chain_of("after last", 2)
    reserved = attached.reserve(chain)
    request = cache_pb2.CommitRequest(
        session_id=attached.session_id,
        reservation_id=reserved.reservation_id,
        positions=u32(0),
        units=u8(0),
        ring_offsets=u64(0),
        lengths=u32(UNIT_BYTES),
        last=True,
    )
    attached.ring_write(0, content_of(chain.keys[:16]))
    assert list(attached.cache.Commit(request).statuses) == [cache_pb2.STATUS_STORED]
    request.positions = u32(1)
    assert list(attached.cache.Commit(request).statuses) == [cache_pb2.STATUS_EXPIRED]
    assert attached.match(chain).page_count == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": u32(2)}, ["positions: row 0 is 2"]),
        ({"positions": u32(2**32 - 1)}, ["positions"]),
        ({"units": u8(1)}, ["units: row 0 is 1"]),
        ({"units": u8(255)}, ["units: row 0 is 255"]),
        ({"ring_offsets": u64((1 << 20) - 1)}, ["ring_offsets"]),
        ({"ring_offsets": u64(2**63 - 1)}, ["ring_offsets: row 0 is", "ring has 1048576 bytes"]),
        ({"ring_offsets": u64(2**64 - 1)}, ["ring_offsets: row 0 is", "ring has 1048576 bytes"]),
        ({"ring_offsets": u64(2**64 - UNIT_BYTES)}, ["ring_offsets"]),
        ({"units": b""}, ["units has 0 rows, must have 1"]),
        ({"lengths": b"ab"}, ["lengths has 2 bytes"]),
        ({"ring_offsets": u64(0, 0)}, ["ring_offsets has 2 rows, must have 1"]),
    ],
)
def test_a_commit_that_points_elsewhere_is_refused_whole(
    attached: RawSession, changes: dict[str, bytes], words: list[str]
) -> None:
    chain = chain_of("elsewhere", 2)
    reserved = attached.reserve(chain)
    row = {"positions": u32(0), "units": u8(0), "ring_offsets": u64(0), "lengths": u32(UNIT_BYTES)}
    assert_invalid(lambda: attached.commit(reserved.reservation_id, **(row | changes)), *words)
    assert attached.match(chain).page_count == 0


def test_a_commit_of_another_length_is_rejected(attached: RawSession) -> None:
    chain = chain_of("length", 1)
    reserved = attached.reserve(chain)
    row = {"positions": u32(0), "units": u8(0), "ring_offsets": u64(0)}
    for length in (0, UNIT_BYTES - 1, UNIT_BYTES + 1):
        statuses = attached.commit(reserved.reservation_id, lengths=u32(length), **row)
        assert statuses == [cache_pb2.STATUS_REJECTED]
    assert attached.match(chain).page_count == 0


def test_a_commit_without_a_ring_is_refused(session: RawSession) -> None:
    reserved = session.reserve(chain_of("no ring", 1))
    assert_invalid(lambda: session.commit(reserved.reservation_id), "no staging ring")


def test_a_unit_larger_than_any_slot_has_a_status(session: RawSession) -> None:
    largest = session.opened.limits.unit_bytes_max
    assert set(session.reserve(chain_of("huge", 2), length=largest + 1).statuses) == {
        cache_pb2.STATUS_TOO_LARGE
    }
    assert set(session.reserve(chain_of("huge 2", 2), length=2**32 - 1).statuses) == {
        cache_pb2.STATUS_TOO_LARGE
    }


def test_a_put_larger_than_the_arena_gets_what_there_is_and_says_so(session: RawSession) -> None:
    pages = 2 * MEMORY_BYTES // UNIT_BYTES
    statuses = session.reserve(chain_of("larger", pages)).statuses
    assert len(statuses) == pages
    reserved = statuses.count(bytes([cache_pb2.STATUS_RESERVED]))
    assert 0 < reserved <= MEMORY_BYTES // UNIT_BYTES
    assert statuses == bytes(
        [cache_pb2.STATUS_RESERVED] * reserved + [cache_pb2.STATUS_NO_ROOM] * (pages - reserved)
    )


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(0, 0, 1, 10)], ["a piece at offset 1, expected 0"]),
        ([(0, 0, 0, 10), (0, 0, 11, 10)], ["a piece at offset 11, expected 10"]),
        ([(0, 0, 0, UNIT_BYTES + 1)], [f"more than the {UNIT_BYTES} bytes"]),
        ([(0, 0, 0, UNIT_BYTES), (0, 0, UNIT_BYTES, 1)], [f"more than the {UNIT_BYTES} bytes"]),
        ([(0, 0, 0, 10)], [f"10 of {UNIT_BYTES} bytes"]),
        ([(0, 0, 0, 10), (1, 0, 0, 10)], [f"page 0, unit 0: 10 of {UNIT_BYTES} bytes"]),
        ([(7, 0, 0, 10)], ["page 7", "chain has 2 pages"]),
        ([(0, 1, 0, 10)], ["unit 1"]),
        ([(0, 2**32 - 1, 0, 10)], ["unit 4294967295"]),
        ([(2**32 - 1, 0, 0, 10)], ["page 4294967295"]),
    ],
)
def test_an_inline_put_out_of_order_is_refused_and_leaves_nothing_half_written(
    session: RawSession, pieces: list[tuple[int, int, int, int]], words: list[str]
) -> None:
    chain = chain_of(f"order {pieces}", 2)
    reserved = session.reserve(chain)
    data = [
        cache_pb2.PutData(position=position, unit=unit, offset=offset, data=bytes(size))
        for position, unit, offset, size in pieces
    ]
    assert_invalid(lambda: session.put(reserved.reservation_id, data), *words)
    whole = 1 if pieces[0][3] == UNIT_BYTES else 0
    assert session.match(chain).page_count == whole


def test_an_inline_put_for_no_reservation_answers_each_unit(session: RawSession) -> None:
    pieces = [cache_pb2.PutData(position=2**32 - 1, unit=unit, data=b"x") for unit in (0, 63)]
    answer = session.put(12345, pieces)
    assert list(answer.statuses) == [cache_pb2.STATUS_EXPIRED] * 2
    assert answer.positions == u32(2**32 - 1, 2**32 - 1)
    pieces = [cache_pb2.PutData(position=0, unit=300, data=b"x")]
    assert_invalid(lambda: session.put(12345, pieces), "unit 300")


def test_a_put_stream_without_header_or_with_two_is_refused(session: RawSession) -> None:
    data = cache_pb2.PutRequest(data=cache_pb2.PutData(data=b"x"))
    header = cache_pb2.PutRequest(header=cache_pb2.PutHeader(session_id=session.session_id))
    put = session.cache.Put
    assert_invalid(lambda: put(iter([data]), timeout=TIMEOUT_S), "must be its header")
    assert_invalid(lambda: put(iter([]), timeout=TIMEOUT_S), "must be its header")
    assert_invalid(lambda: put(iter([header, header]), timeout=TIMEOUT_S), "one header")
    assert_invalid(
        lambda: put(iter([header, cache_pb2.PutRequest()]), timeout=TIMEOUT_S), "one header"
    )


def test_a_variant_that_the_session_cannot_read_is_not_put(node: NodeProcess) -> None:
    with RawSession(node.address, variants=[2]) as session:
        assert_invalid(lambda: session.reserve(chain_of("variant", 1)), "variants: 1 is none")
        session.close()
    assert_serves(node, "variant")


# Leases, holds, reservations


def test_a_second_release_says_not_held(attached: RawSession) -> None:
    chain = chain_of("release", 1)
    attached.store(chain)
    lease_id = next(attached.get(chain, delivery=cache_pb2.DELIVERY_GRANTS)).grants.lease_id
    hold_id = attached.match(chain, hold=True).hold_id
    assert attached.release(lease_id, lease_id, hold_ids=[hold_id, hold_id]) == [1, 0, 1, 0]
    assert attached.release(lease_id, 0, 2**64 - 1, hold_ids=[hold_id]) == [0, 0, 0, 0]


def test_an_expired_lease_is_neither_released_nor_renewed(attached: RawSession) -> None:
    chain = chain_of("expired", 1)
    attached.store(chain)
    stream = attached.get(chain, delivery=cache_pb2.DELIVERY_GRANTS, lease_ms=50)
    lease_id = next(stream).grants.lease_id
    time.sleep(0.3)
    renew = cache_pb2.RenewRequest(session_id=attached.session_id, lease_ids=u64(lease_id))
    assert list(attached.cache.Renew(renew, timeout=TIMEOUT_S).renewed) == [0]
    assert attached.release(lease_id) == [0]


def test_another_sessions_lease_or_hold_is_not_to_be_ended(
    attached: RawSession, node: NodeProcess
) -> None:
    chain = chain_of("not mine", 1)
    attached.store(chain)
    lease_id = next(attached.get(chain, delivery=cache_pb2.DELIVERY_GRANTS)).grants.lease_id
    hold_id = attached.match(chain, hold=True).hold_id
    with RawSession(node.address) as other:
        assert other.release(lease_id, hold_ids=[hold_id]) == [0, 0]
        (outcome,) = other.get(None, hold_id=hold_id)
        assert list(outcome.outcome.statuses) == [cache_pb2.STATUS_EXPIRED]
        other.close()
    assert attached.release(lease_id, hold_ids=[hold_id]) == [1, 1]


def test_an_expired_reservation_takes_no_bytes(attached: RawSession) -> None:
    chain = chain_of("expired reservation", 1)
    reserved = attached.reserve(chain, reservation_ms=50)
    time.sleep(0.3)
    row = {"positions": u32(0), "units": u8(0), "ring_offsets": u64(0), "lengths": u32(UNIT_BYTES)}
    assert attached.commit(reserved.reservation_id, **row) == [cache_pb2.STATUS_EXPIRED]
    piece = cache_pb2.PutData(position=0, unit=0, data=bytes(UNIT_BYTES))
    assert list(attached.put(reserved.reservation_id, [piece]).statuses) == [
        cache_pb2.STATUS_EXPIRED
    ]
    assert attached.match(chain).page_count == 0


def test_leases_holds_and_reservations_of_a_session_are_bounded(attached: RawSession) -> None:
    chain = chain_of("bounded", 1)
    attached.store(chain)
    for _ in range(4):
        assert len(list(attached.get(chain, delivery=cache_pb2.DELIVERY_GRANTS))) == 2
    code, message = refusal(lambda: list(attached.get(chain, delivery=cache_pb2.DELIVERY_GRANTS)))
    assert code is EXHAUSTED
    assert "4 leases" in message
    for _ in range(3):
        assert attached.match(chain, hold=True).hold_id
    code, message = refusal(lambda: attached.match(chain, hold=True))
    assert code is EXHAUSTED
    assert "3 holds" in message
    for number in range(3):
        assert attached.reserve(chain_of(f"bounded {number}", 1)).reservation_id
    code, message = refusal(lambda: attached.reserve(chain_of("bounded 3", 1)))
    assert code is EXHAUSTED
    assert "3 reservations" in message
