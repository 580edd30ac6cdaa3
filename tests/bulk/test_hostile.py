"""Peers at the bulk port that forge, replay, lie, stop reading or never finish."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from tests.bulk.raw_stream import RawStream, grant_of, open_session, open_stream, sent_units
from tests.client.contract import client_of, prompt, stored_prompt
from tests.integration.raw import (
    RawSession,
    assert_no_leaked_slots,
    assert_nothing_held,
    chain_of,
    content_of,
    statistics,
    wait_until,
)
from tests.nodes import NodeProcess

import octavo
from octavo_proto import bulk
from octavo_proto.limits import BULK_STREAMS_MAX
from octavo_proto.v1 import cache_pb2
from octavo_server.bulk.listener import STRANGERS_MAX

LEASE_S = 0.6
BIG = octavo.Layout(name="big", model="m", layers=16, kv_heads=8, head_dim=128, dtype="uint8")
"""Pages of one unit of 512 KiB."""

BIG_BYTES = BIG.raw_unit_bytes(0)
DONE, EXPIRED, REJECTED = (
    cache_pb2.STATUS_DONE,
    cache_pb2.STATUS_EXPIRED,
    cache_pb2.STATUS_REJECTED,
)
STORED = cache_pb2.STATUS_STORED


@pytest.fixture(scope="module")
def module_node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory: Path = tmp_path_factory.mktemp("node")
    with NodeProcess(
        directory, memory_bytes="64MiB", lease_s=LEASE_S, reservation_s=LEASE_S
    ) as running:
        yield running


@pytest.fixture
def node(module_node: NodeProcess) -> Generator[NodeProcess]:
    """The node; whatever happened to it, nothing is held or lost afterwards."""
    yield module_node
    assert_nothing_held(module_node)
    wait_until(
        "no stream and no transfer",
        lambda: (
            not any(
                statistics(module_node).gauges[name] for name in ("bulk_streams", "bulk_transfers")
            )
        ),
    )
    assert_no_leaked_slots(module_node)
    assert "Traceback" not in module_node.log.read_text()


@pytest.fixture
def session(node: NodeProcess) -> Generator[RawSession]:
    with open_session(node.address, BIG) as opened:
        yield opened
        opened.close()


def big_chain(seed: str, page_count: int) -> tuple[cache_pb2.Chain, list[bytes]]:
    chain = chain_of(seed, page_count)
    keys = [chain.keys[begin : begin + 16] for begin in range(0, len(chain.keys), 16)]
    return chain, [content_of(key, 0, BIG_BYTES) for key in keys]


def stored(session: RawSession, seed: str, page_count: int) -> tuple[cache_pb2.Chain, list[bytes]]:
    """A chain that was put over a stream."""
    chain, units = big_chain(seed, page_count)
    reserved = session.reserve(chain, length=BIG_BYTES)
    with open_stream(session) as stream:
        for first in range(0, page_count, 8):
            some = units[first : first + 8]
            sent = sent_units(chain, BIG, some, first)
            assert stream.put(reserved.reservation_id, sent, b"".join(some)) == [STORED] * len(some)
    return chain, units


def counter(node: NodeProcess, name: str) -> int:
    return int(statistics(node).counters[name])


def threads_of(node: NodeProcess) -> int:
    return len(list(Path(f"/proc/{node.pid}/task").iterdir()))


def descriptors_of(node: NodeProcess) -> int:
    return len(list(Path(f"/proc/{node.pid}/fd").iterdir()))


def test_a_thousand_forged_and_replayed_tickets_are_refused_counted_and_cost_nothing(
    node: NodeProcess, session: RawSession
) -> None:
    port = session.opened.bulk.port
    refused, descriptors = counter(node, "bulk_streams_refused"), descriptors_of(node)
    with RawStream(port, session.opened.bulk.ticket) as first:
        assert first.is_welcome
        for number in range(1000):
            ticket = session.opened.bulk.ticket if number % 2 else secrets.token_bytes(16)
            with RawStream(port, ticket) as stream:
                assert stream.has_ended
    wait_until("counted", lambda: counter(node, "bulk_streams_refused") == refused + 1000)
    wait_until("nothing is left", lambda: descriptors_of(node) <= descriptors + 1)


def test_a_ticket_for_the_broker_opens_no_stream(node: NodeProcess, session: RawSession) -> None:
    with RawSession(node.address, attach=False, want_bulk=False) as other:
        assert not other.opened.HasField("bulk")
        other.close()
    with octavo.Client(node.address, layouts=[BIG], transport="shm") as client:
        client.connect()
    request = cache_pb2.OpenSessionRequest(want_shared_memory=True)
    opened = session.cache.OpenSession(request, timeout=5)
    with RawStream(session.opened.bulk.port, opened.shared_memory.ticket) as stream:
        assert stream.has_ended
    session.cache.CloseSession(
        cache_pb2.CloseSessionRequest(session_id=opened.session_id), timeout=5
    )


def test_strangers_that_say_nothing_are_bounded(node: NodeProcess, session: RawSession) -> None:
    refused = counter(node, "bulk_streams_refused")
    where = ("127.0.0.1", int(session.opened.bulk.port))
    silent = [socket.create_connection(where) for _ in range(STRANGERS_MAX)]

    def hangs_up_at_once() -> bool:
        silent.append(socket.create_connection(where))
        silent[-1].settimeout(0.2)
        try:
            return silent[-1].recv(1) == b""
        except TimeoutError:
            return False

    wait_until("one more is refused", hangs_up_at_once)
    for each in silent:
        each.close()
    wait_until(
        "all are counted",
        lambda: counter(node, "bulk_streams_refused") == refused + len(silent),
    )
    with open_stream(session):
        pass


def test_a_session_has_only_so_many_streams(node: NodeProcess, session: RawSession) -> None:
    streams = [open_stream(session) for _ in range(BULK_STREAMS_MAX)]
    with RawStream(session.opened.bulk.port, session.opened.bulk.ticket) as one_more:
        assert one_more.has_ended
    streams.pop().socket.close()
    wait_until("one ended", lambda: statistics(node).gauges["bulk_streams"] == BULK_STREAMS_MAX - 1)
    streams.append(open_stream(session))
    for stream in streams:
        stream.socket.close()


def test_units_outside_of_the_lease_are_refused_and_the_stream_goes_on(
    node: NodeProcess, session: RawSession
) -> None:
    chain, units = stored(session, "outside", 4)
    grant = grant_of(session, chain)
    refused = counter(node, "bulk_requests_refused")
    with open_stream(session) as stream:
        assert stream.get(grant.lease_id, 1, 4).status == REJECTED
        assert stream.get(grant.lease_id, 2**32 - 1, 1).status == REJECTED
        assert stream.get(grant.lease_id + 1000, 0, 1).status == EXPIRED
        answer = stream.get(grant.lease_id, 1, 3)
        assert (answer.status, answer.size_bytes) == (DONE, 3 * BIG_BYTES)
        assert stream.read(3 * BIG_BYTES) == b"".join(units[1:])
    assert counter(node, "bulk_requests_refused") == refused + 3
    session.release(grant.lease_id)


def test_a_lease_of_another_session_is_none(node: NodeProcess, session: RawSession) -> None:
    chain, _ = stored(session, "foreign", 2)
    grant = grant_of(session, chain)
    with open_session(node.address, BIG) as other:
        with open_stream(other) as stream:
            assert stream.get(grant.lease_id, 0, 1).status == EXPIRED
        other.close()
    session.release(grant.lease_id)


def test_grants_for_streams_tell_digests_and_no_places(session: RawSession) -> None:
    chain, units = stored(session, "told", 2)
    grant = grant_of(session, chain)
    assert grant.segments == grant.offsets == grant.generations == b""
    assert grant.digests == sent_units(chain, BIG, units).digests.tobytes()
    session.release(grant.lease_id)


def test_a_lease_that_runs_out_under_a_transfer_leaves_its_bytes_in_place(
    node: NodeProcess, session: RawSession
) -> None:
    """Not time but the end of the transfer lets its memory go, whoever wants it meanwhile."""
    chain, units = stored(session, "slow", 40)
    grant = grant_of(session, chain)
    rows = len(grant.lengths) // 4
    with open_stream(session, buffer_bytes=64 << 10) as stream:
        answer = stream.get(grant.lease_id, 0, rows)
        assert answer.size_bytes == rows * BIG_BYTES
        time.sleep(LEASE_S * 2)
        assert session.release(grant.lease_id) == [0], "it had run out, and the worker is told"
        request = cache_pb2.DeleteRequest(session_id=session.session_id, chain=chain)
        session.cache.Delete(request, timeout=5)
        assert session.match(chain).page_count == 0
        chain_after, _ = big_chain("after", 100)
        wanted = session.reserve(chain_after, length=BIG_BYTES)  # takes all that is free
        assert stream.read(rows * BIG_BYTES) == b"".join(units[:rows])
        session.cache.Abort(
            cache_pb2.AbortRequest(
                session_id=session.session_id, reservation_id=wanted.reservation_id
            ),
            timeout=5,
        )


def test_a_peer_that_stops_reading_costs_no_thread_and_hurts_no_other(
    node: NodeProcess, session: RawSession
) -> None:
    chain, _ = stored(session, "stopped", 32)
    grant = grant_of(session, chain)
    rows = len(grant.lengths) // 4
    streams = [open_stream(session, buffer_bytes=64 << 10) for _ in range(BULK_STREAMS_MAX)]
    for stream in streams:
        stream.send(bulk.Request(bulk.GET, 0, rows, grant.lease_id).pack())
    wait_until(
        "all of them transfer",
        lambda: statistics(node).gauges["bulk_transfers"] == BULK_STREAMS_MAX,
    )
    before = threads_of(node)
    with client_of(node.address, "bulk") as client:
        began_s = time.monotonic()
        _, data = stored_prompt(client, 1, 40)
        buffer = np.zeros_like(data)
        got = client.get(client.chain(prompt(1, 40)), octavo.BufferSink(buffer, 8192))
        assert got.page_count == 40
        assert np.array_equal(buffer, data)
        assert time.monotonic() - began_s < 5
    assert threads_of(node) <= before + 8
    # Ended with its session, not by waiting for the peer.
    session.release(grant.lease_id)
    session.cache.CloseSession(
        cache_pb2.CloseSessionRequest(session_id=session.session_id), timeout=5
    )
    wait_until("all are over", lambda: statistics(node).gauges["bulk_transfers"] == 0)
    for stream in streams:
        stream.socket.close()
    opened = session.cache.OpenSession(cache_pb2.OpenSessionRequest(), timeout=5)
    session.session_id = opened.session_id  # for the fixture to close


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bulk.Request(bulk.GET, 0, 1, 1).pack()[:-8].ljust(24, b"\xff")[::-1],
        bulk.Request(7, 0, 1, 1).pack(),
        bulk.Request(bulk.GET, 0, bulk.ROWS_MAX + 1, 1).pack(),
        bulk.Request(bulk.PUT, 0, 1, 1).pack()
        + bulk.UnitsSent(*(np.array([2**32 - 1]) for _ in range(4))).pack(),
    ],
)
def test_what_makes_no_sense_ends_the_stream_and_is_counted(
    node: NodeProcess, session: RawSession, words: bytes
) -> None:
    refused = counter(node, "bulk_requests_refused")
    with open_stream(session) as stream:
        stream.send(words)
        assert stream.has_ended
    assert counter(node, "bulk_requests_refused") == refused + 1


def test_bytes_for_a_reservation_that_is_over_are_dropped(session: RawSession) -> None:
    chain, units = big_chain("late", 2)
    reserved = session.reserve(chain, length=BIG_BYTES)
    time.sleep(LEASE_S * 1.5)
    with open_stream(session) as stream:
        sent = sent_units(chain, BIG, units)
        assert stream.put(reserved.reservation_id, sent, b"".join(units)) == [EXPIRED] * 2
        assert session.match(chain).page_count == 0
        again = session.reserve(chain, length=BIG_BYTES)
        assert stream.put(again.reservation_id, sent, b"".join(units)) == [STORED] * 2
    assert session.fetch(chain) == [DONE] * 2


def test_units_that_were_not_reserved_or_have_other_bytes_are_rejected(
    node: NodeProcess, session: RawSession
) -> None:
    chain, units = big_chain("rejected", 4)
    reserved = session.reserve(chain, length=BIG_BYTES)
    sent = sent_units(chain, BIG, units)
    wrong = bulk.UnitsSent(
        np.array([0, 9, 2, 3]),  # there is no page 9
        np.array([0, 0, 5, 0]),  # there is no unit 5
        sent.lengths,
        sent.digests ^ np.array([0, 0, 0, 1], dtype=np.uint64),
    )
    with open_stream(session) as stream:
        statuses = stream.put(reserved.reservation_id, wrong, b"".join(units))
        assert statuses == [STORED, REJECTED, REJECTED, REJECTED]
        twice = stream.put(reserved.reservation_id, wrong, b"".join(units))
        assert twice == [REJECTED] * 4, "a unit is filled once"
    assert session.match(chain).page_count == 1
    session.cache.Abort(
        cache_pb2.AbortRequest(
            session_id=session.session_id, reservation_id=reserved.reservation_id
        ),
        timeout=5,
    )


def test_a_put_that_never_ends_keeps_its_places_no_longer_than_its_reservation(
    node: NodeProcess, session: RawSession
) -> None:
    chain, units = big_chain("stalled", 4)
    reserved = session.reserve(chain, length=BIG_BYTES)
    with open_stream(session) as stream:
        stream.put_header(reserved.reservation_id, sent_units(chain, BIG, units))
        stream.send(units[0], units[1][: BIG_BYTES // 2])
        wait_until(
            "its places are free",
            lambda: not any(tier.used_bytes for tier in statistics(node).tiers),
            within_s=LEASE_S + 2,
        )
        assert stream.has_ended
    assert session.match(chain).pending_count == 0
