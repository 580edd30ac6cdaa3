"""Nodes that die, hang, come back, or come back as another: misses, then hits again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.client.contract import (
    UNIT,
    UNITS,
    arena_mappings,
    buffer_for,
    client_of,
    content,
    prompt,
    sink_for,
    stored_prompt,
)
from tests.nodes import NodeProcess

import octavo
from octavo import Status
from octavo.transport.shm import ShmTransport

every_transport = pytest.mark.parametrize("transport", ["shm", "bulk", "grpc"])
only_shm = pytest.mark.parametrize("transport", ["shm"])


def until(holds: Callable[[], bool], within_s: float) -> float:
    """Seconds until ``holds``; fails after ``within_s``."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < within_s, f"not within {within_s} s"
        time.sleep(0.01)
    return time.monotonic() - began_s


def worker(mode: str, address: str, transport: str) -> subprocess.Popen[bytes]:
    """A process that runs ``tests.client.workers``."""
    command = [sys.executable, "-m", "tests.client.workers", mode, address, transport]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


@every_transport
def test_a_killed_node_is_a_miss_and_a_restarted_one_is_found(
    tmp_path: Path, transport: str
) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, transport) as client:
        chain, data = stored_prompt(client, 1, 4)
        first = client.node
        node.kill()
        began_s = time.monotonic()
        assert client.match(chain).page_count == 0
        buffer = buffer_for(4)
        assert client.get(chain, sink_for(buffer)).counts == {Status.UNAVAILABLE: 4}
        assert time.monotonic() - began_s < 1
        node.start()
        until(lambda: client.put(chain, octavo.BufferSource(data, UNIT)).stored_pages == 4, 5)
        assert client.get(chain, sink_for(buffer)).page_count == 4
        assert np.array_equal(buffer, data)
        assert first is not None
        assert client.node is not None
        assert client.node.boot_id != first.boot_id


@every_transport
def test_the_first_call_after_a_quick_restart_is_served(tmp_path: Path, transport: str) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, transport) as client:
        chain, data = stored_prompt(client, 2, 4)
        node.kill()
        node.start()
        assert client.put(chain, octavo.BufferSource(data, UNIT)).stored_pages == 4
        assert client.match(chain).page_count == 4
        assert client.health.swallowed_count == 0


@every_transport
def test_a_node_with_another_master_key_gets_keys_of_its_own(
    tmp_path: Path, transport: str
) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, transport) as client:
        chain, data = stored_prompt(client, 3, 4)
        old_keys = chain.keys
        node.kill()
        node.settings["state_dir"] = tmp_path / "another"
        node.start()
        assert client.put(chain, octavo.BufferSource(data, UNIT)).stored_pages == 4
        assert chain.keys != old_keys
        assert client.match(chain).page_count == 4


@only_shm
def test_the_memory_of_a_dead_node_is_unmapped_within_a_second(
    tmp_path: Path, transport: str
) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, transport) as client:
        others = arena_mappings()  # of other tests of this process
        stored_prompt(client, 4, 4)
        assert arena_mappings() > others
        node.kill()
        until(lambda: arena_mappings() == others, 1.0)
        assert client.transport_name is None


@only_shm
def test_closing_a_client_unmaps_and_frees_the_session(tmp_path: Path, transport: str) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, "grpc") as watcher:
        others = arena_mappings()
        with client_of(node.address, transport) as client:
            stored_prompt(client, 5, 4)
            assert arena_mappings() > others
        assert arena_mappings() == others
        until(lambda: watcher.statistics().counters["sessions_closed"] == 1, 2)


@only_shm
def test_a_copy_in_progress_survives_the_death_of_the_node(tmp_path: Path, transport: str) -> None:
    """Memory unmapped under a copy would kill this process."""
    with NodeProcess(tmp_path) as node, client_of(node.address, transport) as client:
        others = arena_mappings()
        chain, data = stored_prompt(client, 6, 4)

        class Sink:
            units = 0

            def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
                if self.units == 0:
                    node.kill()
                    time.sleep(0.3)  # the hang-up has been seen by now
                begin = (position * UNITS + unit) * UNIT
                assert bytes(view) == data[begin : begin + UNIT].tobytes()
                self.units += 1

        sink = Sink()
        got = client.get(chain, sink)
        assert sink.units == 4 * UNITS
        assert got.page_count == 0, "nobody said that the lease had held"
        until(lambda: arena_mappings() == others, 1.0)


@every_transport
def test_a_hung_node_is_a_miss_within_the_deadline_and_recovers(
    tmp_path: Path, transport: str
) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, transport, timeout_s=0.4) as client:
        chain, data = stored_prompt(client, 7, 4)
        node.pause()
        try:
            began_s = time.monotonic()
            assert client.match(chain).page_count == 0
            waited_s = time.monotonic() - began_s
            assert 0.3 < waited_s < 0.8
            began_s = time.monotonic()
            assert client.get(chain, sink_for(buffer_for(4))).page_count == 0
            assert time.monotonic() - began_s < 0.1, "the breaker spares the next call"
            time.sleep(0.6)
            put = client.put(chain, octavo.BufferSource(data, UNIT))
            assert put.counts == {Status.UNAVAILABLE: 4 * UNITS}
        finally:
            node.resume()
        buffer = buffer_for(4)
        until(lambda: client.get(chain, sink_for(buffer)).page_count == 4, 8)
        assert np.array_equal(buffer, data)


@only_shm
def test_a_put_whose_commit_is_not_answered_never_lends_its_ring_again(
    tmp_path: Path, transport: str
) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, transport, timeout_s=0.5) as client:
        client.connect()
        session = client._connection.session_if_open  # pyright: ignore[reportPrivateUsage]
        assert session is not None
        data = content(8, 4)

        class Source:
            def unit_bytes(self, position: int, unit: int) -> int:
                return UNIT

            def variant(self, position: int) -> int:
                return 1

            def fill(self, position: int, unit: int, view: memoryview) -> int | None:
                if (position, unit) == (0, 0):
                    node.pause()
                begin = (position * UNITS + unit) * UNIT
                view[:] = data[begin : begin + UNIT].tobytes()
                return UNIT

        chain = client.chain(prompt(8, 4))
        result = client.put(chain, Source())
        assert result.counts == {Status.UNAVAILABLE: 4 * UNITS}
        assert isinstance(session.transport, ShmTransport)
        ring = session.transport.ring
        assert ring.used_bytes == 4 * UNITS * UNIT, "the node may read it still"
        node.resume()
        until(lambda: ring.used_bytes == 0, 5)  # answered late, thus free again
        until(lambda: client.match(chain).page_count == 4, 5)
        buffer = buffer_for(4)
        assert client.get(chain, sink_for(buffer)).page_count == 4
        assert np.array_equal(buffer, data)


@every_transport
def test_a_worker_killed_in_the_middle_of_a_put_leaves_nothing_behind(
    tmp_path: Path, transport: str
) -> None:
    with (
        NodeProcess(tmp_path, session_idle_s=1, reservation_s=1) as node,
        client_of(node.address, "grpc") as watcher,
    ):
        chain = watcher.chain(prompt(9, 4))
        with worker("stall", node.address, transport) as stalled:
            until(lambda: watcher.match(chain).pending_count == 4, 15)
            stalled.kill()
        until(lambda: watcher.match(chain).pending_count == 0, 5)
        data = content(9, 4)
        assert watcher.put(chain, octavo.BufferSource(data, UNIT)).stored_pages == 4


@every_transport
@pytest.mark.parametrize("mode", ["fork-before", "fork-after"])
def test_a_fork_is_safe_for_parent_and_child(tmp_path: Path, transport: str, mode: str) -> None:
    with NodeProcess(tmp_path) as node, worker(mode, node.address, transport) as forking:
        assert forking.wait(30) == 0


@every_transport
def test_durable_pages_are_got_from_nvme_after_a_kill(tmp_path: Path, transport: str) -> None:
    with (
        NodeProcess(tmp_path, nvme_dir=tmp_path / "nvme", nvme_bytes="64MiB") as node,
        client_of(node.address, transport) as client,
    ):
        chain, data = stored_prompt(client, 11, 40)
        assert client.flush().durable_pages == 40
        node.kill()
        node.start()
        found = client.match(chain)
        assert [(run.tier, run.page_count) for run in found.runs] == [(octavo.Tier.NVME, 40)]
        buffer = buffer_for(40)
        assert client.get(chain, sink_for(buffer)).counts == {Status.DONE: 40}
        assert np.array_equal(buffer, data)
        assert client.match(chain).runs[0].tier is octavo.Tier.MEMORY


@every_transport
def test_many_gets_through_a_restart_never_see_a_wrong_byte(tmp_path: Path, transport: str) -> None:
    with NodeProcess(tmp_path) as node, client_of(node.address, transport) as client:
        stop = threading.Event()
        wrong: list[int] = []
        served = [0]

        def work(seed: int) -> None:
            chain, data = client.chain(prompt(seed, 8)), content(seed, 8)
            while not stop.is_set():
                client.put(chain, octavo.BufferSource(data, UNIT))
                buffer = buffer_for(8)
                pages = client.get(chain, sink_for(buffer)).page_count
                good = pages * UNITS * UNIT
                served[0] += pages
                if not np.array_equal(buffer[:good], data[:good]):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(20, 24)]
        for thread in threads:
            thread.start()
        time.sleep(0.4)
        node.kill()
        node.start()
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert served[0] > 0
        chain, data = client.chain(prompt(20, 8)), content(20, 8)
        until(lambda: client.put(chain, octavo.BufferSource(data, UNIT)).failed_pages == 0, 8)
        assert client.get(chain, sink_for(buffer_for(8))).page_count == 8
