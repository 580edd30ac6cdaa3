"""``kill -9`` under load, again and again: nothing half-written, nothing flushed lost, no leak."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tests.integration.raw import (
    assert_no_leaked_slots,
    assert_nothing_held,
    content_of,
    statistics,
    wait_until,
)
from tests.nodes import NodeProcess

import octavo
from octavo.terms import TransportChoice

LAYOUT: Final = octavo.Layout(
    name="kv", model="m", layers=8, kv_heads=2, head_dim=32, dtype="uint8", head_parts=2
)
UNIT_BYTES: Final = LAYOUT.raw_unit_bytes(0)
PAGE_BYTES: Final = LAYOUT.raw_page_bytes
PAGES: Final = 8
CHAINS_A_WORKER: Final = 24
LOAD_S: Final = (0.2, 0.7)
"""How long the load runs before each kill: shorter and longer than the write-behind lags."""


def chain_of(client: octavo.Client, number: int) -> octavo.Chain:
    """Chain ``number``; chains of one ten share their first pages, as prompts do."""
    shared = [number // 10] * (3 * LAYOUT.page_tokens)
    own = range(number * 1000, number * 1000 + (PAGES - 3) * LAYOUT.page_tokens)
    return client.chain([*shared, *own])


def expected_bytes(keys: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What the pages of these keys must hold."""
    pages = [keys[begin : begin + 16] for begin in range(0, len(keys), 16)]
    units = (content_of(key, unit, UNIT_BYTES) for key in pages for unit in (0, 1))
    return np.frombuffer(b"".join(units), dtype=np.uint8)


@dataclass
class Load:
    """Workers that put and get the same chains over and over, and look at each byte they get."""

    address: str
    seed: int
    stop: threading.Event = field(default_factory=threading.Event)
    wrong: list[str] = field(default_factory=list[str])
    checked_pages: int = 0
    stored: set[int] = field(default_factory=set[int])
    """Chains of which a put or get said that they are there, whole."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, worker: int) -> None:
        rng = random.Random(self.seed * 100 + worker)
        transports: tuple[TransportChoice, ...] = ("shm", "bulk", "grpc")
        numbers = range(worker // 2 * CHAINS_A_WORKER, (worker // 2 + 1) * CHAINS_A_WORKER)
        expected: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        client = octavo.Client(
            self.address,
            layouts=[LAYOUT],
            timeout_s=2.0,
            transport=transports[worker % 3],
        )
        with client:
            while not self.stop.is_set():
                number = rng.choice(numbers)
                try:
                    chain = chain_of(client, number)
                    if number not in expected:
                        expected[number] = expected_bytes(chain.keys)
                    self.turn(client, chain, number, expected[number])
                except octavo.NodeUnavailable:
                    self.stop.wait(0.05)  # no node now: its keys can't be had
                except Exception as error:  # noqa: BLE001 - whatever it is fails the test
                    self.wrong.append(f"worker {worker}: {error!r}")
                    return

    def turn(
        self,
        client: octavo.Client,
        chain: octavo.Chain,
        number: int,
        expected: np.ndarray[tuple[int], np.dtype[np.uint8]],
    ) -> None:
        got = np.zeros(PAGES * PAGE_BYTES, dtype=np.uint8)
        result = client.get(chain, octavo.BufferSink(got, UNIT_BYTES), wait_pending=False)
        good = got.reshape(PAGES, -1) == expected.reshape(PAGES, -1)
        for page in np.flatnonzero(result.statuses == octavo.Status.DONE):
            if not good[page].all():
                self.wrong.append(f"chain {number}, page {page}: {int((~good[page]).sum())} bytes")
            self.checked_pages += 1
        whole = result.page_count == PAGES
        if not whole:
            put = client.put(chain, octavo.BufferSource(expected, UNIT_BYTES))
            whole = put.failed_pages == 0
        if whole:
            with self.lock:
                self.stored.add(number)


def run_rounds(directory: Path, round_count: int, seed: int) -> None:
    node = NodeProcess(
        directory,
        memory_bytes="4MiB",  # a fraction of what is put: pages come and go between the tiers
        staging_ring_bytes="1MiB",
        nvme_dir=directory / "nvme",
        nvme_bytes="64MiB",
    )
    rng = random.Random(seed)
    with node:
        load = Load(node.address, seed)
        threads = [threading.Thread(target=load.run, args=(worker,)) for worker in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(round_count):
                one_round(node, load, rng, number)
        finally:
            load.stop.set()
            for thread in threads:
                thread.join(timeout=30)
        assert not load.wrong, load.wrong[:5]
        assert load.checked_pages > 100 * round_count / 6
        assert_nothing_held(node)
        for tier in statistics(node).tiers:
            assert tier.used_bytes == tier.page_bytes, f"slots without pages: {tier}"
        assert_no_leaked_slots(node)
        assert "Traceback" not in node.log.read_text()


def one_round(node: NodeProcess, load: Load, rng: random.Random, number: int) -> None:
    with octavo.Client(node.address, layouts=[LAYOUT], timeout_s=5.0) as client:
        client.connect()
        doomed = chain_of(client, 1_000 + number)
        source = octavo.BufferSource(expected_bytes(doomed.keys), UNIT_BYTES)
        assert client.put(doomed, source).failed_pages == 0
        load.stop.wait(rng.uniform(*LOAD_S))
        with load.lock:
            flushed = set(load.stored)
        client.flush(timeout_s=20)
        client.delete(doomed)
        load.stop.wait(rng.uniform(0, 0.1))
        node.kill()
    node.start()
    assert not load.wrong, load.wrong[:5]
    with octavo.Client(node.address, layouts=[LAYOUT], timeout_s=5.0) as client:
        client.connect()
        gone = client.match(chain_of(client, 1_000 + number))
        assert gone.page_count < PAGES, "a deleted chain came back with the restart"
        for flushed_number in sorted(flushed):
            chain = chain_of(client, flushed_number)
            got = np.zeros(PAGES * PAGE_BYTES, dtype=np.uint8)
            result = client.get(chain, octavo.BufferSink(got, UNIT_BYTES))
            assert result.page_count == PAGES, f"flushed chain {flushed_number}: {result.counts}"
            assert (got == expected_bytes(chain.keys)).all(), f"flushed chain {flushed_number}"
    wait_until("the load goes on", lambda: statistics(node).gauges["sessions"] >= 3, 10)


def test_rounds_of_kill_under_load_serve_no_wrong_page_and_lose_nothing_flushed(
    tmp_path: Path,
) -> None:
    run_rounds(tmp_path, 6, seed=1)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_thirty_rounds_of_kill_under_load(tmp_path: Path) -> None:
    run_rounds(tmp_path, 30, seed=2)
