"""Bulk streams of one session: threads that carry parts of gets and puts, a connection each.

All calls of a client share them: parts wait in one queue, and whichever stream is free takes the
next. A stream asks for a part ahead while the one before still arrives, so the node never waits
for a request.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from octavo.errors import (
    CallCancelled,
    ConnectError,
    NodeFailed,
    NodeTimeout,
    NodeUnavailable,
)
from octavo.health import HealthRecorder
from octavo.transport.bulk_socket import BulkSocket

IDLE_S: Final = 30.0
"""A thread without work ends after this; its connection stays for the next one."""

CONNECT_S: Final = 1.0
"""A host that answers at all answers sooner; a filter that drops everything costs this once."""

REFUSED_PAUSE_S: Final = 5.0
"""After the bulk port could not be reached, gRPC carries the bytes for this long."""


class Part(ABC):
    """Some units of one call. ``begin`` and ``end`` run on a stream's thread."""

    can_go_again: bool
    """Whether another stream may try again after this one broke."""

    def __init__(self, call: Call) -> None:
        self.call: Final = call
        self.error: NodeUnavailable | None = None
        """Why it did not arrive; None where ``end`` returned."""
        self.doubtful = False
        """Bytes failed their check: more than those may be wrong about the stream."""

    @abstractmethod
    def begin(self, stream: BulkSocket) -> None:
        """Sends the request, and what goes with it."""

    @abstractmethod
    def end(self, stream: BulkSocket) -> None:
        """Receives the answer."""


class Call:
    """The parts of one get or put. Used by the thread that makes the call, until ``close``."""

    def __init__(self, streams: Streams, until_s: float) -> None:
        self._streams = streams
        self.until_s: Final = until_s
        self._done: SimpleQueue[Part | None] = SimpleQueue()
        self._ended = False
        self._cancelled = False
        self.open_count = 0
        """Parts that were submitted and not collected."""

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for its parts. For streams; any thread."""
        return not self._ended

    def submit(self, part: Part) -> None:
        self.open_count += 1
        self._streams.submit(part)

    def finished(self, part: Part) -> None:
        """``part`` has ended, well or not. For streams; any thread."""
        self._done.put(part)

    def cancel(self) -> None:
        """Makes ``collect`` raise CallCancelled. For the call's scope; any thread."""
        self._cancelled = True
        self._done.put(None)

    def collect(self, *, wait: bool) -> Part | None:
        """A part that has ended; None where none has yet, without ``wait``, or none is open.

        Raises:
            CallCancelled: the call was cancelled.
            NodeTimeout: none ended in time.
        """
        while self.open_count:
            try:
                left_s = max(0.0, self.until_s - time.monotonic())
                part = self._done.get(block=wait, timeout=left_s if wait else None)
            except Empty:
                if wait:
                    raise NodeTimeout("the deadline passed before all bytes had moved") from None
                return None
            if self._cancelled:
                self.open_count -= part is not None
                raise CallCancelled("cancelled")
            if part is not None:
                self.open_count -= 1
                return part
        return None

    def close(self) -> None:
        """Ends the parts that are still open. No stream uses the call's memory any more when it
        returns."""
        self._ended = True
        if self.open_count:
            self._streams.withdraw(self)
        while self.open_count:
            self.open_count -= self._done.get() is not None


class Streams:
    """Up to ``stream_count`` streams. Safe for use by several threads."""

    def __init__(
        self,
        connect: Callable[[float], BulkSocket],
        stream_count: int,
        first: BulkSocket,
        health: HealthRecorder,
    ) -> None:
        """``connect`` opens another stream within so many seconds; it raises NodeUnavailable."""
        self._connect = connect
        self._health = health
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._queue: deque[Part] = deque()
        self._lanes = [_Lane(self) for _ in range(stream_count)]
        self._lanes[0].stream = first
        self._idle_count = 0
        self._closed = False
        self._refused_until_s = 0.0
        self._doubted_until_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether it is worth submitting anything now."""
        now_s = time.monotonic()
        if self._closed or now_s < self._doubted_until_s:
            return False
        return now_s >= self._refused_until_s or self._others_have_streams(None)

    def doubt(self) -> None:
        """Bytes were asked for, and none came in time: new calls had better go another way for a
        while, unless a part of some other call arrives."""
        self._doubted_until_s = time.monotonic() + REFUSED_PAUSE_S

    def submit(self, part: Part) -> None:
        """Queues a part; its call hears of its end."""
        with self._lock:
            if self._closed:
                part.error = ConnectError("the session's bulk streams are closed")
                part.call.finished(part)
                return
            self._queue.append(part)
            if self._idle_count >= len(self._queue):
                self._ready.notify()
                return
            self._start_lane()

    def withdraw(self, call: Call) -> None:
        """Ends a call's parts: those that wait, and those that a stream is carrying."""
        with self._lock:
            for part in [part for part in self._queue if part.call is call]:
                self._queue.remove(part)
                part.error = ConnectError("the call ended before its transfer")
                call.finished(part)
            for lane in self._lanes:
                if any(part.call is call for part in lane.begun) and lane.stream is not None:
                    lane.stream.hang_up()

    def close(self) -> None:
        """Ends everything."""
        with self._lock:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            for lane in self._lanes:
                if lane.stream is not None:
                    lane.stream.hang_up()
                    if not lane.runs:
                        lane.close_stream()
            self._ready.notify_all()
        for part in waiting:
            part.error = ConnectError("the session's bulk streams are closed")
            part.call.finished(part)

    def leave_to_parent(self) -> None:
        """In a forked child: closes the descriptors here; the parent's streams stay."""
        self._closed = True
        for lane in self._lanes:
            lane.close_stream()

    def connect_for(self, lane: _Lane, part: Part) -> BulkSocket:
        """Another stream for a lane, to carry ``part`` first. Raises NodeUnavailable."""
        left_s = part.call.until_s - time.monotonic()
        if time.monotonic() < self._refused_until_s:
            raise ConnectError("the bulk port was out of reach a moment ago")
        if left_s <= 0:
            raise NodeTimeout("the deadline passed before a bulk stream was open")
        try:
            stream = self._connect(min(left_s, CONNECT_S))
        except NodeUnavailable as error:
            self._refused_until_s = time.monotonic() + REFUSED_PAUSE_S
            self._health.failure("bulk_unreachable", error)
            raise
        with self._lock:
            if self._closed:
                stream.close()
                raise ConnectError("the session's bulk streams are closed")
            lane.stream = stream
        self._health.count("bulk_streams_opened")
        return stream

    def take(self, lane: _Lane, after: Part | None) -> Part | None:
        """The next part for a lane, which counts as begun. Waits for one unless one is wanted to
        follow ``after``; None: there is none, or nothing to wait for any more.

        Only a part of the same kind follows: with a put sent behind a get whose bytes nobody
        reads yet, both sides would wait for the other one to read.
        """
        with self._lock:
            if after is not None:
                if not self._queue or type(self._queue[0]) is not type(after):
                    return None
            else:
                self._idle_count += 1
                in_time = self._ready.wait_for(lambda: self._queue or self._closed, IDLE_S)
                self._idle_count -= 1
                if not in_time or self._closed:
                    lane.runs = False
                    if self._closed:
                        lane.close_stream()
                    return None
                # Asked after the wait: what another lane could not connect for woke this one.
                refused = lane.stream is None and time.monotonic() < self._refused_until_s
                if refused and self._others_have_streams(lane):
                    lane.runs = False
                    self._ready.notify()
                    self._start_lane()
                    return None
            part = self._queue.popleft()
            lane.begun.append(part)
            return part

    def replace(self, lane: _Lane) -> None:
        """A lane's stream is not to be used again."""
        with self._lock:
            lane.close_stream()

    def ended(self, lane: _Lane, part: Part) -> None:
        """A lane's part has ended, and its stream is well."""
        with self._lock:
            lane.begun.remove(part)
            if part.error is None:
                self._doubted_until_s = 0.0
        part.call.finished(part)

    def broke(self, lane: _Lane, error: NodeUnavailable) -> None:
        """A lane's stream is of no more use: what it carried goes to another one, or fails."""
        with self._lock:
            begun, lane.begun = lane.begun, []
            lane.close_stream()
            again = [part for part in begun if self._goes_again(part)]
            self._queue.extendleft(reversed(again))
            self._ready.notify(len(again))
        for part in begun:
            if part not in again:
                part.error = error
                part.call.finished(part)
        if any(part.call.wanted for part in begun):
            self._health.failure("bulk_stream_broke", error)

    def _others_have_streams(self, lane: _Lane | None) -> bool:
        return any(other.stream is not None for other in self._lanes if other is not lane)

    def _start_lane(self) -> None:
        """One more thread for what waits, if there is one that can do anything about it: those
        that have streams come first, and where none has, one that will say so."""
        refused = time.monotonic() < self._refused_until_s and self._others_have_streams(None)
        for lane in sorted(self._lanes, key=lambda each: each.stream is None):
            if lane.stream is None and refused:
                return
            if lane.start():
                return

    def _goes_again(self, part: Part) -> bool:
        again = part.can_go_again and part.call.wanted and self.usable
        part.can_go_again = False
        return again and time.monotonic() < part.call.until_s


class _Lane:
    """One stream's thread, its connection, and what it carries now. The lists and the stream
    are changed under the lock of ``Streams``."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.stream: BulkSocket | None = None
        self.begun: list[Part] = []
        self.runs = False

    def start(self) -> bool:
        """Starts the thread; False if it runs already."""
        if self.runs:
            return False
        self.runs = True
        threading.Thread(target=self._work, name="octavo-bulk", daemon=True).start()
        return True

    def close_stream(self) -> None:
        """Gives the connection up."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _work(self) -> None:
        while (part := self._streams.take(self, None)) is not None:
            try:
                self._carry(part)
            except NodeUnavailable as error:
                self._streams.broke(self, error)
            except Exception as error:  # noqa: BLE001 - a call waits for the part, and is told
                self._streams.broke(self, NodeFailed(f"on a bulk stream: {error!r}"))

    def _carry(self, first: Part) -> None:
        """Carries a part, and those that can be begun behind it."""
        stream = self.stream or self._streams.connect_for(self, first)
        part: Part | None = first if self._begin(first, stream) else None
        doubtful = False
        while part is not None:
            ahead = None if doubtful else self._streams.take(self, part)
            if ahead is not None and not self._begin(ahead, stream):
                ahead = None
            part.end(stream)
            doubtful = doubtful or part.doubtful
            if doubtful and ahead is None:
                self._streams.replace(self)
            self._streams.ended(self, part)
            part = ahead

    def _begin(self, part: Part, stream: BulkSocket) -> bool:
        """False: it comes too late, and nothing was sent."""
        if part.call.wanted and time.monotonic() < part.call.until_s:
            part.begin(stream)
            return True
        part.error = NodeTimeout("the call ended before a bulk stream was free")
        self._streams.ended(self, part)
        return False
