"""Nodes that hang, stop or start again, with clients at work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
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
from octavo_proto.v1 import cache_pb2

LAYOUT = octavo.Layout(name="kv", model="m", layers=8, kv_heads=2, head_dim=32, dtype="uint8")
UNIT_BYTES = LAYOUT.raw_unit_bytes(0)
PAGES = 8
TIMEOUT_S = 1.0
BREAKER_MAX_S = 6.0
"""A client looks for a node at least this often."""


def pages_of(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, PAGES * UNIT_BYTES, dtype=np.uint8)


def tokens_of(number: int) -> range:
    return range(number * 1000, number * 1000 + PAGES * LAYOUT.page_tokens)


@dataclass
class Caller:
    """A thread that puts and gets chains of its own, one after the other, and times each call."""

    address: str
    first: int
    stop: threading.Event
    durations_s: list[float] = field(default_factory=list[float])
    stored: list[int] = field(default_factory=list[int])
    wrong: list[str] = field(default_factory=list[str])
    got_count: int = 0

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.run)
        thread.start()
        return thread

    def run(self) -> None:
        number = self.first
        with octavo.Client(self.address, layouts=[LAYOUT], timeout_s=TIMEOUT_S) as client:
            client.connect(timeout_s=10)
            client.chain().keys  # noqa: B018 - learns the namespace's key while there is a node
            while not self.stop.is_set():
                try:
                    self.turn(client, number)
                except octavo.NodeUnavailable:
                    self.stop.wait(0.02)  # there was no session to have the namespace's key from
                except Exception as error:  # noqa: BLE001 - whatever it is fails the test
                    self.wrong.append(repr(error))
                    return
                self.stop.wait(0.005)
                number += 1
                if number == self.first + 50:
                    number = self.first

    def turn(self, client: octavo.Client, number: int) -> None:
        content, got = pages_of(number), np.zeros(PAGES * UNIT_BYTES, dtype=np.uint8)
        chain = client.chain(tokens_of(number))
        began = time.monotonic()
        result = client.get(chain, octavo.BufferSink(got, UNIT_BYTES))
        self.durations_s.append(time.monotonic() - began)
        good = (got.reshape(PAGES, -1) == content.reshape(PAGES, -1)).all(axis=1)
        if not good[result.statuses == octavo.Status.DONE].all():
            self.wrong.append(f"chain {number}: {result.counts}")
        self.got_count += result.page_count == PAGES
        if result.page_count < PAGES:
            began = time.monotonic()
            put = client.put(chain, octavo.BufferSource(content, UNIT_BYTES))
            self.durations_s.append(time.monotonic() - began)
            if put.failed_pages == 0:
                self.stored.append(number)


def test_a_paused_node_costs_every_caller_a_deadline_at_most_and_then_next_to_nothing(
    tmp_path: Path,
) -> None:
    with NodeProcess(tmp_path) as node:
        stop = threading.Event()
        callers = [Caller(node.address, 1000 * number, stop) for number in range(3)]
        threads = [caller.start() for caller in callers]
        try:
            wait_until("all of them got", lambda: all(caller.got_count for caller in callers), 20)
            calls_before = [len(caller.durations_s) for caller in callers]
            node.pause()
            time.sleep(4 * TIMEOUT_S)
            node.resume()
            for caller, before in zip(callers, calls_before, strict=True):
                durations = caller.durations_s[before:]
                # One that finds out, then one probe after each backoff of 0.5, 1, 2 seconds.
                assert sum(duration > TIMEOUT_S / 2 for duration in durations) <= 3
                assert sum(duration < 0.1 for duration in durations) > 20
            got = [caller.got_count for caller in callers]
            wait_until(
                "they get again",
                lambda: all(c.got_count > n for c, n in zip(callers, got, strict=True)),
                BREAKER_MAX_S,
            )
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
        for caller in callers:
            assert not caller.wrong
            assert max(caller.durations_s) < TIMEOUT_S + 1.0
        assert_nothing_held(node)
        assert_no_leaked_slots(node)


def arenas(pid: int) -> dict[str, int]:
    """Arena segments that a process has mapped: inode → bytes."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:octavo-arena" in line:
            begin, _, end = line.split()[0].partition("-")
            inode = line.split()[4]
            found[inode] = found.get(inode, 0) + int(end, 16) - int(begin, 16)
    return found


def test_after_a_restart_no_memory_of_the_dead_node_is_left(tmp_path: Path) -> None:
    with (
        NodeProcess(tmp_path, memory_bytes="64MiB") as node,
        octavo.Client(node.address, layouts=[LAYOUT], timeout_s=5.0) as client,
    ):
        client.connect()
        chain = client.chain(tokens_of(1))
        source = octavo.BufferSource(pages_of(1), UNIT_BYTES)
        assert client.put(chain, source).stored_pages == PAGES
        before = arenas(node.pid)
        assert arenas(os.getpid()).keys() == before.keys()
        node.kill()
        node.start()
        wait_until(
            "the old arena is unmapped", lambda: not arenas(os.getpid()).keys() & before.keys(), 1
        )
        assert client.put(chain, source).failed_pages == 0
        after = arenas(node.pid) | arenas(os.getpid())
        assert sum(after.values()) <= 1.1 * sum(before.values())


def test_sigterm_under_load_takes_no_new_work_and_loses_nothing_that_was_put(
    tmp_path: Path,
) -> None:
    settings = {"nvme_dir": tmp_path / "nvme", "nvme_bytes": "256MiB", "drain_s": 20}
    with NodeProcess(tmp_path, **settings) as node:
        stop = threading.Event()
        callers = [Caller(node.address, 1000 * number, stop) for number in range(3)]
        threads = [caller.start() for caller in callers]
        try:
            wait_until("a load", lambda: all(len(c.stored) > 10 for c in callers), 30)
            with RawSession(node.address) as session:
                os.kill(node.pid, signal.SIGTERM)
                refusals = refused_until_gone(session)
            assert node.process is not None
            assert node.process.wait(timeout=25) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
        granted = [number for number, code in enumerate(refusals) if code is None]
        assert granted == list(range(len(granted))), "it took new work after it had refused some"
        assert set(refusals[len(granted) : -1]) <= {grpc.StatusCode.UNAVAILABLE}
        assert not any(caller.wrong for caller in callers)
        assert "Traceback" not in node.log.read_text()
        node.start()
        with octavo.Client(node.address, layouts=[LAYOUT], timeout_s=10) as client:
            for number in sorted(number for caller in callers for number in caller.stored):
                got = np.zeros(PAGES * UNIT_BYTES, dtype=np.uint8)
                chain = client.chain(tokens_of(number))
                result = client.get(chain, octavo.BufferSink(got, UNIT_BYTES))
                assert result.page_count == PAGES, f"chain {number}: {result.counts}"
                assert (got == pages_of(number)).all()
        for tier in statistics(node).tiers:
            assert tier.used_bytes == tier.page_bytes


def refused_until_gone(session: RawSession) -> list[grpc.StatusCode | None]:
    """Reserves until the node is gone; what each was answered, None where it was granted."""
    answers: list[grpc.StatusCode | None] = []
    for number in range(10_000):
        try:
            session.reserve(chain_of(f"late {number}", 1))
            answers.append(None)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)  # noqa: PT017 - for the type checker
            answers.append(error.code())
            if "shutting down" not in (error.details() or ""):
                return answers
        time.sleep(0.002)
    raise AssertionError("it never stopped listening")


def test_sigterm_without_load_ends_within_its_grace(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node, RawSession(node.address, attach=True) as session:
        chain = chain_of("still being written", 1)
        reserved = session.reserve(chain)
        waiting = session.get(chain, wait_pending=True)
        assert reserved.statuses == bytes([cache_pb2.STATUS_RESERVED])
        began = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - began < 5
        waiting.cancel()


def test_a_put_that_ends_while_the_node_stops_is_durable_too(tmp_path: Path) -> None:
    # The node grants a second. On a machine too busy for the rest of a put within it, the put is
    # cancelled, and this has to be tried again.
    tries = (ends_while_the_node_stops(tmp_path / str(number)) for number in range(5))
    assert any(tries), "no put ended before the node did"


def ends_while_the_node_stops(directory: Path) -> bool:
    """Puts the second half of a page while the node stops; whether that was in time."""
    directory.mkdir()
    with NodeProcess(directory, nvme_dir=directory / "nvme", nvme_bytes="64MiB") as node:
        chain = chain_of("put while stopping", 1)
        with RawSession(node.address) as session:
            reserved = session.reserve(chain)
            content = content_of(chain.keys)

            def half_then_stop_then_half() -> Iterator[cache_pb2.PutRequest]:
                yield from session.put_messages(reserved.reservation_id, [])
                half = len(content) // 2
                yield cache_pb2.PutRequest(data=cache_pb2.PutData(data=content[:half]))
                os.kill(node.pid, signal.SIGTERM)
                time.sleep(0.3)  # well within the second of grace, and behind the first drain
                data = cache_pb2.PutData(offset=half, data=content[half:])
                yield cache_pb2.PutRequest(data=data)

            try:
                answer = session.cache.Put(half_then_stop_then_half(), timeout=TIMEOUT_S * 5)
            except grpc.RpcError as error:
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.CANCELLED:
                    return False
                raise
        assert list(answer.statuses) == [cache_pb2.STATUS_STORED]
        assert node.process is not None
        assert node.process.wait(timeout=15) == 0
        node.start()
        with RawSession(node.address) as session:
            assert session.fetch(chain) == [cache_pb2.STATUS_DONE]
    return True
