"""Workers that die or stall in the middle of a put or get leak nothing and hurt nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tests.integration.raw import (
    HALVES,
    UNIT_BYTES,
    RawSession,
    assert_no_leaked_slots,
    assert_nothing_held,
    assert_serves,
    chain_of,
    statistics,
    wait_until,
)
from tests.integration.stalling_worker import PAGES, tokens_of
from tests.nodes import NodeProcess

import octavo
from octavo_proto.v1 import cache_pb2

ROOT: Final = Path(__file__).parents[2]
DEADLINE_S: Final = 0.8
"""Of leases, holds and reservations of these nodes."""

STORED, EXPIRED = cache_pb2.STATUS_STORED, cache_pb2.STATUS_EXPIRED


class Worker(AbstractContextManager["Worker"]):
    """A stalling worker that has reached the moment its role is about."""

    def __init__(self, node: NodeProcess, role: str, seed: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.stalling_worker", node.address, role, seed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._line() == "ready", f"{role} ended with {self.process.wait(10)}"

    def __exit__(self, *_exception: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def stall(self, seconds: float) -> None:
        """SIGSTOP for a while; then it runs again but still waits."""
        self.stop()
        time.sleep(seconds)
        self.resume()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def go_on(self) -> list[int]:
        """Lets it finish; what it was answered."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [int(value) for value in self._line().split()]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def module_node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    with NodeProcess(
        tmp_path_factory.mktemp("node"),
        memory_bytes="8MiB",
        staging_ring_bytes="1MiB",
        lease_s=DEADLINE_S,
        hold_s=DEADLINE_S,
        reservation_s=DEADLINE_S,
        session_idle_s=2,
    ) as running:
        yield running


@pytest.fixture
def node(module_node: NodeProcess) -> Generator[NodeProcess]:
    """The node; whatever happened on it, nothing is lost afterwards."""
    yield module_node
    assert_nothing_held(module_node)
    assert_serves(module_node, "afterwards")
    assert_no_leaked_slots(module_node)
    assert "Traceback" not in module_node.log.read_text()


def used_bytes(node: NodeProcess) -> int:
    return sum(tier.used_bytes for tier in statistics(node).tiers)


def assert_ends_within_a_second(node: NodeProcess) -> None:
    gauges = ("attached_sessions", "leases", "holds", "reservations", "pinned_pages")
    wait_until(
        "the dead worker's session is over",
        lambda: not any(statistics(node).gauges[name] for name in gauges),
        within_s=1.0,
    )


def test_a_worker_killed_in_a_put_loses_its_session_and_only_what_it_had_not_committed(
    node: NodeProcess,
) -> None:
    chain = chain_of("killed put", PAGES, layout=1)
    with Worker(node, "put", "killed put") as worker:
        assert statistics(node).gauges["reservations"] == 1
        worker.kill()
        # Sooner than the reservation would have run out.
        assert_ends_within_a_second(node)
    assert used_bytes(node) == 3 * UNIT_BYTES
    with RawSession(node.address) as session:
        assert session.match(chain).page_count == 1
        assert session.match(chain).pending_count == 0
        assert session.fetch(chain)[:2] == [cache_pb2.STATUS_DONE, cache_pb2.STATUS_MISSING]
        left = session.reserve(chain)
        assert list(left.statuses) == [cache_pb2.STATUS_ALREADY_PRESENT] * 3 + [
            cache_pb2.STATUS_RESERVED
        ] * (2 * PAGES - 3)
        session.close()


def test_a_worker_killed_in_an_inline_put_gives_its_places_back(node: NodeProcess) -> None:
    chain = chain_of("killed inline", PAGES, layout=1)
    with Worker(node, "put_inline", "killed inline") as worker:
        wait_until("three units", lambda: statistics(node).counters["put_units_stored"] % 3 == 0)
        worker.kill()
        # Its session had no broker connection, so it is the reservation's time that ends it.
        assert_nothing_held(node, within_s=DEADLINE_S + 1)
    assert used_bytes(node) == 3 * UNIT_BYTES
    with RawSession(node.address) as session:
        assert session.match(chain).page_count == 1
        session.close()


def test_a_worker_killed_in_a_get_holds_nothing_a_second_later(node: NodeProcess) -> None:
    with RawSession(node.address) as session:
        session.store(chain_of("killed get", PAGES, layout=1))
        with Worker(node, "get", "killed get") as worker:
            assert statistics(node).gauges["pinned_pages"] == PAGES
            worker.kill()
            assert_ends_within_a_second(node)
        session.close()


def test_a_worker_killed_while_it_waits_for_pages_holds_nothing_a_second_later(
    node: NodeProcess,
) -> None:
    chain = chain_of("killed waiting", PAGES, layout=1)
    with RawSession(node.address, attach=True) as writer:
        reserved = writer.reserve(chain)
        with Worker(node, "waiting_get", "killed waiting") as worker:
            wait_until("the get waits", lambda: statistics(node).gauges["pinned_pages"] == PAGES)
            worker.kill()
            wait_until(
                "nothing is pinned any more",
                lambda: statistics(node).gauges["pinned_pages"] == 0,
                within_s=1.0,
            )
        abort = cache_pb2.AbortRequest(
            session_id=writer.session_id, reservation_id=reserved.reservation_id
        )
        writer.cache.Abort(abort, timeout=5)
        writer.close()


def test_a_late_commit_is_expired_and_what_others_put_meanwhile_stays(node: NodeProcess) -> None:
    chain = chain_of("late commit", PAGES, layout=1)
    with Worker(node, "put", "late commit") as worker, RawSession(node.address) as other:
        worker.stop()
        assert set(other.reserve(chain).statuses[3:]) == {cache_pb2.STATUS_PENDING}
        wait_until("its time is over", lambda: statistics(node).gauges["reservations"] == 0)
        reserved = other.reserve(chain)
        assert set(reserved.statuses[3:]) == {cache_pb2.STATUS_RESERVED}
        assert used_bytes(node) == 2 * PAGES * UNIT_BYTES
        worker.resume()
        assert set(worker.go_on()) == {EXPIRED}
        assert other.match(chain).page_count == 1
        other.close()


def test_a_stopped_inline_put_gives_up_its_place_in_time_and_is_expired_later(
    node: NodeProcess,
) -> None:
    chain = chain_of("stopped inline", PAGES, layout=1)
    with Worker(node, "put_inline", "stopped inline") as worker:
        wait_until("its places", lambda: used_bytes(node) == 2 * PAGES * UNIT_BYTES)
        worker.stop()
        # The half-sent unit's place too, although the call is still open.
        wait_until(
            "what was not put is free", lambda: used_bytes(node) == 3 * UNIT_BYTES, DEADLINE_S + 1.5
        )
        worker.resume()
        assert worker.go_on() == [STORED] * 3 + [EXPIRED] * (2 * PAGES - 3)
    with RawSession(node.address) as session:
        assert session.match(chain).page_count == 1
        session.close()


def test_a_late_release_says_not_held_and_the_pages_were_not_kept(node: NodeProcess) -> None:
    chain = chain_of("late release", PAGES, layout=1)
    with RawSession(node.address) as session:
        session.store(chain)
        with Worker(node, "get", "late release") as worker:
            worker.stop()
            wait_until("its time is over", lambda: statistics(node).gauges["pinned_pages"] == 0)
            for number in range(3):  # others go on, and take the room
                filler = chain_of(f"late release filler {number}", 1000)
                session.store(filler)
                assert session.fetch(filler) == [cache_pb2.STATUS_DONE] * 1000
            assert session.match(chain).page_count == 0
            worker.resume()
            assert worker.go_on() == [0, 0]
        session.close()


def test_a_copy_that_a_stop_stretched_beyond_its_lease_is_thrown_away(node: NodeProcess) -> None:
    seed = "late copy"
    pages = np.arange(2 * PAGES * UNIT_BYTES, dtype=np.uint64).astype(np.uint8)
    with octavo.Client(node.address, layouts=[HALVES]) as client:
        chain = client.chain(tokens_of(seed))
        assert client.put(chain, octavo.BufferSource(pages, UNIT_BYTES)).stored_pages == PAGES
        with Worker(node, "client_get", seed) as worker:
            worker.stall(DEADLINE_S + 0.4)
            assert worker.go_on() == [EXPIRED] * PAGES
        got = np.zeros_like(pages)
        assert client.get(chain, octavo.BufferSink(got, UNIT_BYTES)).page_count == PAGES
        assert (got == pages).all()


def test_a_stopped_inline_get_keeps_no_lease_and_what_it_got_late_is_not_wrong(
    node: NodeProcess,
) -> None:
    chain = chain_of("stopped get", 256, layout=1)
    with RawSession(node.address) as before:
        before.store(chain)
        before.close()
    with Worker(node, "get_inline", "stopped get") as worker:
        worker.stop()
        wait_until("no lease", lambda: statistics(node).gauges["leases"] == 0)
        wait_until("no pin", lambda: statistics(node).gauges["pinned_pages"] == 0)
        with RawSession(node.address) as filler:  # idle sessions end soon on this node
            for number in range(3):
                filler.store(chain_of(f"stopped get filler {number}", 1000))
        worker.resume()
        statuses = worker.go_on()  # the worker holds each byte it got against its key
    assert len(statuses) == 256
    assert set(statuses) <= {cache_pb2.STATUS_DONE, EXPIRED, cache_pb2.STATUS_MISSING}
    assert EXPIRED in statuses
