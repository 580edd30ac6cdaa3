"""Threads that move bytes, so that the event loop never waits for them.

An operation is performed by a thread and then handed to its sink on the event loop. Threads
put finished operations into one deque and wake the loop only when no wake-up is pending, so
that a burst of completions costs one callback, not a future each.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

POOL_THREADS: Final = 16
"""Calls that ``IoPool.run`` performs at once."""

CLOSE_POLL_S: Final = 0.005
"""How often ``close`` looks whether the threads have ended."""

Sink = Callable[[list[Any]], None]


class Operation(ABC):
    """Something that a thread does. Subclasses implement ``perform`` and add what it needs.

    ``sink`` is called on the event loop with the operations that finished since the last
    call, in the order in which they finished. ``error`` is what ``perform`` raised.
    """

    __slots__ = ("error", "sink")

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.error: BaseException | None = None

    @abstractmethod
    def perform(self) -> None:
        """Runs in a thread; must release the GIL in whatever takes long."""


class Call(Operation, Generic[T]):
    """An operation made of a plain function."""

    __slots__ = ("call", "future", "result")

    def __init__(self, call: Callable[[], T], future: asyncio.Future[T]) -> None:
        super().__init__(_resolve)
        self.call = call
        self.future = future

    def perform(self) -> None:
        self.result = self.call()


class Lane:
    """A queue with up to ``depth`` threads of its own, started when there is work for them.

    Lanes keep kinds of work from starving each other: a flood of writes leaves the threads of
    the read lane alone. The queue is as long as what callers submit; each operation holds
    memory that its caller reserved, and that is what bounds it.
    """

    def __init__(self, pool: IoPool, name: str, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"the depth of lane {name} is {depth}, allowed: at least 1")
        self.depth: Final = depth
        self._pool = pool
        self._name = name
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queues operations in order. Call it on the event loop of the pool.

        Once the pool is closing they finish with ECANCELED instead of being performed.
        """
        if self._pool.closing:
            for operation in operations:
                self._pool.finish(operation, _canceled())
            return
        wanted = min(self.depth, len(self._threads) + len(operations))
        while len(self._threads) < wanted:
            thread = threading.Thread(
                target=self._work, name=f"octavo-{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        put = self._queue.put
        for operation in operations:
            put(operation)

    def stop(self) -> None:
        """Lets the threads end once they have emptied the queue."""
        for _ in self._threads:
            self._queue.put(None)

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        pool = self._pool
        while (operation := self._queue.get()) is not None:
            error: BaseException | None = None
            if pool.closing:
                error = _canceled()
            else:
                try:
                    operation.perform()
                except BaseException as caught:  # noqa: BLE001 - whoever submitted it gets it
                    error = caught
            pool.finish(operation, error)
            del operation  # or an idle thread would keep the last buffer alive


class IoPool:
    """All lanes of one event loop. Create it, and submit to it, on that loop's thread."""

    def __init__(self, threads: int = POOL_THREADS) -> None:
        self.closing = False
        self._loop = asyncio.get_running_loop()
        self._finished: deque[Operation] = deque()
        self._wake_pending = False
        self._lanes: list[Lane] = []
        self._calls = self.lane("calls", threads)

    def lane(self, name: str, depth: int) -> Lane:
        """A new lane; it lives as long as the pool."""
        lane = Lane(self, name, depth)
        self._lanes.append(lane)
        return lane

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queues operations in the lane that ``run`` uses."""
        self._calls.submit(operations)

    async def run(self, call: Callable[[], T]) -> T:
        """Result of ``call``, made in a thread. Raises what it raised.

        A caller that is cancelled stops waiting; the call itself goes on to its end.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.submit([Call(call, future)])
        return await future

    async def close(self, timeout_s: float) -> bool:
        """Ends the threads; False if some still hang in a system call when time is up.

        What had not begun finishes with ECANCELED. Hanging threads are left behind: they are
        daemons and do not keep the process from ending.
        """
        self.closing = True
        for lane in self._lanes:
            lane.stop()
        deadline = self._loop.time() + timeout_s
        while any(lane.alive for lane in self._lanes):
            if self._loop.time() >= deadline:
                self._deliver()
                return False
            await asyncio.sleep(CLOSE_POLL_S)
        self._deliver()
        return True

    def finish(self, operation: Operation, error: BaseException | None) -> None:
        """Hands an operation back to the loop. For lanes; callable from any thread."""
        operation.error = error
        self._finished.append(operation)
        # The append comes before the test, and ``_deliver`` clears the flag before it empties
        # the deque: whoever sees the flag set knows that a delivery is still to come.
        if not self._wake_pending:
            self._wake_pending = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                self._finished.clear()

    def _deliver(self) -> None:
        self._wake_pending = False
        finished = self._finished
        by_sink: dict[Sink, list[Operation]] = {}
        while finished:
            operation = finished.popleft()
            by_sink.setdefault(operation.sink, []).append(operation)
        for sink, operations in by_sink.items():
            try:
                sink(operations)
            except Exception as error:  # noqa: BLE001 - one sink's bug must not lose the others' work
                self._loop.call_exception_handler(
                    {"message": "a sink of the I/O pool failed", "exception": error}
                )


def _canceled() -> OSError:
    return OSError(errno.ECANCELED, "the I/O pool is closing")


def _resolve(calls: list[Call[Any]]) -> None:
    for call in calls:
        if call.future.done():  # its caller was cancelled
            continue
        if call.error is None:
            call.future.set_result(call.result)
        else:
            call.future.set_exception(call.error)
