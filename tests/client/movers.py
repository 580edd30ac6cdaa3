"""Sinks and sources that are slow, fail, or hold objects of any size."""

from __future__ import annotations

import threading
import time

from tests.client.contract import UNIT, UNITS, Bytes


class SlowSource:
    """Gives its first unit only when told to."""

    def __init__(self, data: Bytes) -> None:
        self._units = data.reshape(-1, UNITS, UNIT)
        self.started, self.proceed = threading.Event(), threading.Event()

    def unit_bytes(self, position: int, unit: int) -> int:
        return UNIT

    def variant(self, position: int) -> int:
        return 1

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        self.started.set()
        assert self.proceed.wait(10)
        view[:] = self._units[position, unit].tobytes()
        return UNIT


class FailingSource:
    def unit_bytes(self, position: int, unit: int) -> int:
        return UNIT

    def variant(self, position: int) -> int:
        return 1

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        raise ZeroDivisionError


class FailingSink:
    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        raise ZeroDivisionError


class SlowSink:
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._last = -1

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        time.sleep(self._pause_s)


class ForeignObjects:
    """Whole objects by name: a source and a sink."""

    def __init__(self, objects: dict[bytes, bytes]) -> None:
        self.objects = objects
        self.names: list[bytes] = []

    def unit_bytes(self, position: int, unit: int) -> int:
        return len(self.objects[self.names[position]])

    def variant(self, position: int) -> int:
        return 1

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        view[:] = self.objects[self.names[position]]
        return len(view)

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        self.objects[self.names[position]] = bytes(view)
