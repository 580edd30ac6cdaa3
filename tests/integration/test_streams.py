"""Gets that stream, holds, waits: the order and the ends of what a node hands out."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.raw import (
    LAYOUT,
    TIMEOUT_S,
    UNIT_BYTES,
    RawSession,
    assert_no_leaked_slots,
    assert_nothing_held,
    chain_of,
    content_of,
    statistics,
    u32,
    u64,
    wait_until,
)
from tests.nodes import NodeProcess

from octavo_proto import columns
from octavo_proto.keys import digest_seed, unit_digest
from octavo_proto.v1 import cache_pb2

GRANTS, INLINE = cache_pb2.DELIVERY_GRANTS, cache_pb2.DELIVERY_INLINE
DONE, GRANTED = cache_pb2.STATUS_DONE, cache_pb2.STATUS_GRANTED
EXPIRED, MISSING = cache_pb2.STATUS_EXPIRED, cache_pb2.STATUS_MISSING
COLD_PAGES = 3000


@pytest.fixture(scope="module")
def module_node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory = tmp_path_factory.mktemp("node")
    with NodeProcess(
        directory,
        nvme_dir=directory / "nvme",
        nvme_bytes="256MiB",
        slab_bytes="4MiB",
        hold_s=1.5,
    ) as running:
        yield running


@pytest.fixture
def node(module_node: NodeProcess) -> Generator[NodeProcess]:
    yield module_node
    assert_nothing_held(module_node)
    assert_no_leaked_slots(module_node)
    assert "Traceback" not in module_node.log.read_text()


@pytest.fixture
def session(node: NodeProcess) -> Generator[RawSession]:
    with RawSession(node.address, attach=True) as opened:
        yield opened
        opened.close()


def make_cold(node: NodeProcess, seed: str, page_count: int) -> cache_pb2.Chain:
    """A chain that lies on NVMe only: stored, flushed, and the node killed and started again."""
    chain = chain_of(seed, page_count)
    with RawSession(node.address) as session:
        session.store(chain)
        flush = cache_pb2.FlushRequest(session_id=session.session_id)
        assert session.cache.Flush(flush, timeout=TIMEOUT_S).volatile_pages == 0
    node.kill()
    node.start()
    return chain


def in_memory(node: NodeProcess) -> int:
    (pages,) = [tier.page_count for tier in statistics(node).tiers if tier.tier == "memory"]
    return pages


def test_grants_stream_while_later_pages_still_load_from_nvme(node: NodeProcess) -> None:
    chain = make_cold(node, "cold", COLD_PAGES)
    with RawSession(node.address, attach=True) as session:
        assert [run.tier for run in session.match(chain).runs] == [cache_pb2.TIER_NVME]
        began = time.monotonic()
        granted: list[tuple[float, int]] = []
        positions: list[int] = []
        for response in session.get(chain, delivery=GRANTS):
            if response.HasField("outcome"):
                assert set(response.outcome.statuses) == {GRANTED}
                break
            batch = columns.read("positions", response.grants.positions, columns.U32).tolist()
            units = session.arena_read(response.grants)
            for position, unit in zip(batch, units, strict=True):
                assert unit == content_of(chain.keys[position * 16 :][:16])
            assert session.release(response.grants.lease_id) == [1]
            positions += batch
            granted.append((time.monotonic() - began, len(batch)))
        assert sorted(positions) == list(range(COLD_PAGES))
        assert len(granted) > 3
        assert granted[0][0] < granted[-1][0] / 2, "the first grant waited for the others"
        session.close()


def test_an_inline_unit_comes_in_pieces_with_a_digest_on_the_last(session: RawSession) -> None:
    chain, length = chain_of("pieces", 1), (2 << 20) + 4097
    assert length <= session.opened.limits.unit_bytes_max
    content = content_of(chain.keys, 0, length)
    reserved = session.reserve(chain, length=length)
    cuts = [0, 1 << 20, 2 << 20, length]
    pieces = [
        cache_pb2.PutData(offset=begin, data=content[begin:end]) for begin, end in pairwise(cuts)
    ]
    assert list(session.put(reserved.reservation_id, pieces).statuses) == [cache_pb2.STATUS_STORED]
    *data, end = list(session.get(chain))
    assert [piece.data.offset for piece in data] == cuts[:-1]
    assert [piece.data.last for piece in data] == [False, False, True]
    assert b"".join(piece.data.data for piece in data) == content
    seed = digest_seed(chain.keys, LAYOUT.fingerprint(), 0, 1, length)
    assert [piece.data.digest for piece in data] == [0, 0, unit_digest(content, seed)]
    assert list(end.outcome.statuses) == [DONE]


@pytest.mark.parametrize("delivery", [GRANTS, INLINE])
@pytest.mark.parametrize("cold", [False, True])
def test_a_get_cancelled_midway_leaks_nothing(
    node: NodeProcess, delivery: cache_pb2.Delivery.ValueType, cold: bool
) -> None:
    seed = f"cancelled {delivery} {cold}"
    chain = make_cold(node, seed, 1000) if cold else chain_of(seed, 1000)
    with RawSession(node.address, attach=True) as session:
        if not cold:
            session.store(chain)
        for count in range(3):
            stream = session.get(chain, delivery=delivery, lease_ms=500)
            for _ in range(count):
                next(stream)
            stream.cancel()

        def unpinned() -> bool:
            gauges = statistics(node).gauges
            return gauges["nvme_loading_units"] == 0 and gauges["pinned_pages"] == 0

        # Leases that were granted before the cancellation are the session's until their time.
        wait_until("nothing pinned", unpinned, 2.5)
        assert session.fetch(chain) == [DONE] * 1000
        session.close()


def test_a_session_closed_during_its_get_holds_nothing(node: NodeProcess) -> None:
    chain = chain_of("closed", 4)
    with RawSession(node.address) as writer, RawSession(node.address) as reader:
        reserved = writer.reserve(chain)
        stream = reader.get(chain, wait_pending=True)
        wait_until("it waits", lambda: statistics(node).gauges["pinned_pages"] == 4)
        closing = cache_pb2.CloseSessionRequest(session_id=reader.session_id)
        reader.cache.CloseSession(closing, timeout=TIMEOUT_S)
        pieces = [
            cache_pb2.PutData(position=page, data=content_of(chain.keys[page * 16 :][:16]))
            for page in range(4)
        ]
        writer.put(reserved.reservation_id, pieces)
        with pytest.raises(Exception, match="unknown session"):
            list(stream)
        assert_nothing_held(node, within_s=0.5)
        writer.close()


def test_a_hold_loads_at_once_and_a_get_consumes_it(node: NodeProcess) -> None:
    chain = make_cold(node, "held", 200)
    with RawSession(node.address) as session:
        found = session.match(chain, hold=True)
        assert found.page_count == 200
        assert found.hold_id
        assert 0 < found.hold_ms <= 1500
        wait_until("it is in memory before anybody gets it", lambda: in_memory(node) == 200, 1.0)
        assert session.fetch(chain, hold_id=found.hold_id) == [DONE] * 200
        assert statistics(node).gauges["holds"] == 0
        assert session.fetch(chain, hold_id=found.hold_id) == [EXPIRED]
        session.close()


def test_a_hold_keeps_its_pages_until_it_is_released(
    node: NodeProcess, session: RawSession
) -> None:
    chain = chain_of("hold", 100)
    session.store(chain)
    hold_id = session.match(chain, hold=True, hold_ms=1500).hold_id
    assert statistics(node).gauges["pinned_pages"] >= 100
    assert session.release(hold_ids=[hold_id]) == [1]
    assert statistics(node).gauges["holds"] == 0
    assert session.release(hold_ids=[hold_id]) == [0]


def test_a_match_without_hold_pins_nothing(node: NodeProcess, session: RawSession) -> None:
    chain = chain_of("probe", 10)
    session.store(chain)
    wait_until("written behind", lambda: statistics(node).gauges["pinned_pages"] == 0)
    assert session.match(chain).page_count == 10
    gauges = statistics(node).gauges
    assert (gauges["pinned_pages"], gauges["holds"], gauges["leases"]) == (0, 0, 0)


def test_renewing_keeps_a_lease_hold_and_reservation_beyond_their_first_terms(
    session: RawSession,
) -> None:
    chain, missing = chain_of("renew", 1), chain_of("renew missing", 1)
    session.store(chain)
    lease_id = next(session.get(chain, delivery=GRANTS, lease_ms=400)).grants.lease_id
    hold_id = session.match(chain, hold=True, hold_ms=400).hold_id
    reservation_id = session.reserve(missing, reservation_ms=400).reservation_id
    renew = cache_pb2.RenewRequest(
        session_id=session.session_id,
        lease_ids=u64(lease_id),
        hold_ids=u64(hold_id),
        reservation_ids=u64(reservation_id),
        duration_ms=400,
    )
    for _ in range(5):
        time.sleep(0.2)
        assert list(session.cache.Renew(renew, timeout=TIMEOUT_S).renewed) == [1, 1, 1]
    assert session.release(lease_id, hold_ids=[hold_id]) == [1, 1]
    piece = cache_pb2.PutData(data=content_of(missing.keys))
    assert list(session.put(reservation_id, [piece]).statuses) == [cache_pb2.STATUS_STORED]
    assert list(session.cache.Renew(renew, timeout=TIMEOUT_S).renewed) == [0, 0, 0]


def test_a_get_waits_for_pages_that_another_session_writes(
    node: NodeProcess, session: RawSession
) -> None:
    chain = chain_of("pending", 3)
    reserved = session.reserve(chain)
    results: list[list[int]] = []
    with RawSession(node.address) as reader:
        assert reader.match(chain).pending_count == 3
        assert reader.fetch(chain) == [MISSING] * 3
        assert reader.fetch(chain, wait_pending=True, wait_ms=50) == [cache_pb2.STATUS_PENDING] * 3
        waiting = threading.Thread(
            target=lambda: results.append(reader.fetch(chain, wait_pending=True))
        )
        waiting.start()
        wait_until("it waits", lambda: statistics(node).gauges["pinned_pages"] == 3)
        pieces = [
            cache_pb2.PutData(position=page, data=content_of(chain.keys[page * 16 :][:16]))
            for page in range(3)
        ]
        session.put(reserved.reservation_id, pieces)
        waiting.join(TIMEOUT_S)
        assert results == [[DONE] * 3]
        reader.close()


def test_a_get_does_not_wait_for_a_writer_that_gave_up(
    node: NodeProcess, session: RawSession
) -> None:
    chain = chain_of("given up", 2)
    reserved = session.reserve(chain)
    with RawSession(node.address) as reader:
        began = time.monotonic()
        stream = reader.get(chain, wait_pending=True)
        wait_until("it waits", lambda: statistics(node).gauges["pinned_pages"] == 2)
        abort = cache_pb2.AbortRequest(
            session_id=session.session_id, reservation_id=reserved.reservation_id
        )
        assert session.cache.Abort(abort, timeout=TIMEOUT_S).held
        (end,) = list(stream)
        assert list(end.outcome.statuses) == [MISSING] * 2
        assert time.monotonic() - began < 2
        reader.close()


def test_pages_before_the_first_position_are_not_delivered(session: RawSession) -> None:
    chain = chain_of("first", 5)
    session.store(chain)
    grants, end = list(session.get(chain, first_position=3, delivery=GRANTS))
    assert grants.grants.positions == u32(3, 4)
    assert list(end.outcome.statuses) == [GRANTED] * 2
    assert session.fetch(chain, first_position=3) == [DONE] * 2


def test_a_deleted_page_stays_readable_for_whoever_leases_it(session: RawSession) -> None:
    chain = chain_of("deleted", 2)
    session.store(chain)
    grants = next(session.get(chain, delivery=GRANTS)).grants
    delete = cache_pb2.DeleteRequest(session_id=session.session_id, chain=chain)
    assert list(session.cache.Delete(delete, timeout=TIMEOUT_S).statuses) == [DONE] * 2
    assert session.match(chain).page_count == 0
    session.store(chain_of("deleted, the next one", 500))
    expected = [content_of(chain.keys[page * 16 :][:16]) for page in range(2)]
    assert session.arena_read(grants) == expected
    assert session.release(grants.lease_id) == [1]


def test_what_is_written_behind_is_durable_after_a_flush(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node, RawSession(node.address) as session:
        session.store(chain_of("volatile", 7))
        flush = cache_pb2.FlushRequest(session_id=session.session_id)
        answer = session.cache.Flush(flush, timeout=TIMEOUT_S)
        assert (answer.durable_pages, answer.volatile_pages) == (0, 7)  # it has no NVMe tier
        assert statistics(node).tiers[0].used_bytes == 7 * UNIT_BYTES
