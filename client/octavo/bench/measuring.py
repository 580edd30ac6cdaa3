"""What the benchmarks share: clocks, medians, progress, how busy the machine was."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def seconds(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median time of ``work`` in milliseconds, after one call that is not counted."""
    work()
    return median([seconds(work) for _ in range(repeats)]) * 1e3


def progress(items: Iterable[T], title: str, total: int) -> Iterator[T]:
    """The items, with a progress bar on a terminal's standard error."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, title, total=total, console=Console(stderr=True), transient=True)


class IdleShare:
    """How much of the machine nobody used since this was made, from the kernel's counters."""

    def __init__(self) -> None:
        self._idle, self._all = _cpu_ticks()

    def since(self) -> float:
        """0 to 1."""
        idle, total = _cpu_ticks()
        return (idle - self._idle) / max(1, total - self._all)


def _cpu_ticks() -> tuple[int, int]:
    """Idle ticks and all ticks of all processors so far."""
    fields = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
