"""Threads that move bytes."""

from __future__ import annotations

import asyncio
import errno
import threading
import time

import pytest
from tests.store.nvme_bench import eventually

from octavo_server.store.io_pool import IoPool, Operation, Sink


class Step(Operation):
    """Waits for a gate, if it has one; fails if told to."""

    __slots__ = ("fails", "gate", "performed", "thread")

    def __init__(
        self, sink: Sink, *, gate: threading.Event | None = None, fails: bool = False
    ) -> None:
        super().__init__(sink)
        self.gate = gate
        self.fails = fails
        self.performed = False
        self.thread = 0

    def perform(self) -> None:
        if self.gate is not None:
            self.gate.wait(10)
        if self.fails:
            raise OSError(errno.EIO, "told to")
        self.performed = True
        self.thread = threading.get_ident()


class Collector:
    def __init__(self) -> None:
        self.finished: list[Step] = []
        self.calls = 0
        self.thread = 0

    def __call__(self, steps: list[Step]) -> None:
        self.calls += 1
        self.finished += steps
        self.thread = threading.get_ident()

    async def wait_for(self, count: int) -> None:
        await eventually(lambda: len(self.finished) >= count)


def test_operations_run_in_threads_and_finish_on_the_loop() -> None:
    async def run() -> None:
        pool, collector = IoPool(threads=4), Collector()
        steps = [Step(collector) for _ in range(100)]
        pool.submit(steps)
        await collector.wait_for(100)
        assert set(collector.finished) == set(steps)
        assert collector.thread == threading.get_ident()
        assert threading.get_ident() not in {step.thread for step in steps}
        assert await pool.close(5)

    asyncio.run(run())


def test_a_burst_of_completions_wakes_the_loop_once() -> None:
    async def run() -> None:
        pool, collector = IoPool(threads=4), Collector()
        steps = [Step(collector) for _ in range(200)]
        pool.submit(steps)
        time.sleep(0.2)  # noqa: ASYNC251 - the loop must not run while they finish
        await asyncio.sleep(0.01)
        assert len(collector.finished) == 200
        assert collector.calls == 1
        await pool.close(5)

    asyncio.run(run())


def test_a_blocked_lane_does_not_hold_up_another() -> None:
    async def run() -> None:
        pool, slow, fast, gate = IoPool(threads=1), Collector(), Collector(), threading.Event()
        writes, reads = pool.lane("writes", 2), pool.lane("reads", 1)
        writes.submit([Step(slow, gate=gate) for _ in range(10)])
        reads.submit([Step(fast) for _ in range(5)])
        await fast.wait_for(5)
        assert not slow.finished
        gate.set()
        await slow.wait_for(10)
        await pool.close(5)

    asyncio.run(run())


def test_no_more_run_at_once_than_the_depth_says() -> None:
    async def run() -> None:
        pool, collector, gate = IoPool(threads=1), Collector(), threading.Event()
        lane = pool.lane("deep", 3)
        steps = [Step(collector, gate=gate) for _ in range(20)]
        before = threading.active_count()
        lane.submit(steps)
        assert threading.active_count() - before == 3
        gate.set()
        await collector.wait_for(20)
        assert len({step.thread for step in steps}) <= 3
        await pool.close(5)

    asyncio.run(run())


def test_a_failure_reaches_its_own_operation_only() -> None:
    async def run() -> None:
        pool, collector = IoPool(threads=2), Collector()
        bad, good = Step(collector, fails=True), Step(collector)
        pool.submit([bad, good])
        await collector.wait_for(2)
        assert isinstance(bad.error, OSError)
        assert bad.error.errno == errno.EIO
        assert good.error is None
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert await pool.run(lambda: 7) == 7
        await pool.close(5)

    asyncio.run(run())


def test_a_sink_that_fails_does_not_take_others_with_it() -> None:
    async def run() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        pool, collector = IoPool(threads=1), Collector()

        def broken(_: list[Step]) -> None:
            raise RuntimeError("sink")

        pool.submit([Step(broken), Step(collector)])
        await collector.wait_for(1)
        assert len(complaints) == 1
        await pool.close(5)

    asyncio.run(run())


def test_closing_cancels_what_has_not_begun_and_tells_of_it() -> None:
    async def run() -> None:
        pool, collector, gate = IoPool(threads=1), Collector(), threading.Event()
        steps = [Step(collector, gate=gate) for _ in range(5)]
        pool.submit(steps)
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(pool.close(5))
        await asyncio.sleep(0)
        gate.set()
        assert await closing
        late = Step(collector)
        pool.submit([late])
        await collector.wait_for(6)
        assert steps[0].performed
        for step in [*steps[1:], late]:
            assert not step.performed
            assert isinstance(step.error, OSError)
            assert step.error.errno == errno.ECANCELED

    asyncio.run(run())


def test_closing_gives_up_on_a_thread_that_hangs() -> None:
    async def run() -> None:
        pool, gate = IoPool(threads=1), threading.Event()
        pool.submit([Step(Collector(), gate=gate)])
        await asyncio.sleep(0.02)
        begun = time.monotonic()
        assert not await pool.close(0.1)
        assert time.monotonic() - begun < 2
        gate.set()

    asyncio.run(run())


def test_a_cancelled_caller_of_run_leaves_the_pool_usable() -> None:
    async def run() -> None:
        pool, gate = IoPool(threads=1), threading.Event()
        task = asyncio.create_task(pool.run(lambda: gate.wait(10)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        assert await pool.run(lambda: "next") == "next"
        await pool.close(5)

    asyncio.run(run())
