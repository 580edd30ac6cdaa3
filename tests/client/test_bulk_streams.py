"""How the streams of a client share its parts, where some can't be opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, cast

from octavo.errors import ConnectError, NodeTimeout
from octavo.health import HealthRecorder
from octavo.transport.bulk_streams import Call, Part, Streams

LONG_S = 60.0


class GatedPart(Part):
    """Nothing travels; it has arrived once its gate is open."""

    can_go_again = True

    def __init__(self, call: Call, *, is_open: bool = True) -> None:
        super().__init__(call)
        self.begun = threading.Event()
        self.gate = threading.Event()
        if is_open:
            self.gate.set()

    def begin(self, stream: object) -> None:
        self.begun.set()

    def end(self, stream: object) -> None:
        assert self.gate.wait(LONG_S)


class Door:
    """Further connections wait at it until it is shut for good."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.shut = threading.Event()

    def connect(self, timeout_s: float) -> NoReturn:
        self.reached.set()
        assert self.shut.wait(LONG_S)
        raise ConnectError("refused")


class Stream:
    def hang_up(self) -> None: ...

    def close(self) -> None: ...


def idle_count(streams: Streams) -> int:
    return streams._idle_count  # pyright: ignore[reportPrivateUsage]


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_part_that_found_no_stream_waits_for_one_that_is_open() -> None:
    """Not for a thread that has no stream either, and was idle when the port was still thought to
    be in reach."""
    door = Door()
    streams = Streams(door.connect, 3, cast("Any", Stream()), HealthRecorder())
    call = Call(streams, time.monotonic() + LONG_S)
    busy, moved = GatedPart(call, is_open=False), GatedPart(call)
    call.submit(busy)
    assert busy.begun.wait(LONG_S)
    call.submit(moved)
    assert door.reached.wait(LONG_S)
    late = Call(streams, time.monotonic())
    too_late = GatedPart(late)
    streams.submit(too_late)
    until(lambda: isinstance(too_late.error, NodeTimeout))
    until(lambda: idle_count(streams) == 1)
    door.shut.set()
    until(lambda: idle_count(streams) == 0)
    busy.gate.set()
    assert {call.collect(wait=True), call.collect(wait=True)} == {busy, moved}
    assert (busy.error, moved.error) == (None, None)
    streams.close()
