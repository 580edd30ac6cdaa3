"""When a device that fails is left alone, and what is said about it. Pure: time is passed in."""

from __future__ import annotations

import errno
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

from octavo_proto.limits import UNITS_MAX

WRITE_ERRORS_MAX: Final = 8
"""Consecutive failed writes after which writing pauses: one batch's worth at full depth."""

READ_ERRORS_MAX: Final = 8
"""Consecutive failed reads after which the device counts as broken."""

RETRY_S: Final = 5.0
"""Pause before a few writes probe whether the device has recovered."""

PROBE_UNITS: Final = UNITS_MAX
"""Units that may be written as a probe: one page at least, for pages are written whole."""

_POINTLESS: Final = {errno.EROFS, errno.ENODEV, errno.ENXIO}
"""Errors after which the next write would fail just as well."""


class Room(Enum):
    """Why ``allocate`` has no room, or that it has."""

    AVAILABLE = "available"
    GUARDED = "free-space guard"
    """The file system is nearly full: evicting units would free little or nothing."""
    PAUSED = "writes paused"
    """The device fails writes: evicting units would not help."""


@dataclass(slots=True)
class StoreCounters:
    """Totals since the store was opened."""

    units_written: int = 0
    units_read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    write_errors: int = 0
    read_errors: int = 0
    corrupt_units: int = 0
    log_errors: int = 0
    log_records: int = 0
    compactions: int = 0
    compaction_errors: int = 0
    direct_refused: int = 0
    frames_torn: int = 0
    frames_damaged: int = 0
    records_lost: int = 0
    records_dropped: int = 0
    forgets_dropped: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class WriteBreaker:
    """Takes writes out of service after consecutive errors and probes with few."""

    def __init__(self) -> None:
        self._errors_in_row = 0
        self._paused_until: float | None = None

    @property
    def paused(self) -> bool:
        return self._paused_until is not None

    def admit(self, wanted: int, now_s: float) -> int:
        """How many of ``wanted`` writes may be begun."""
        if self._paused_until is None:
            return wanted
        if now_s < self._paused_until or wanted == 0:
            return 0
        # The pause goes on behind the probe; one that its caller never writes costs no more.
        self._paused_until = now_s + RETRY_S
        return min(wanted, PROBE_UNITS)

    def succeeded(self) -> None:
        self._errors_in_row = 0
        self._paused_until = None

    def failed(self, error: BaseException | None, now_s: float) -> None:
        self._errors_in_row += 1
        code = error.errno if isinstance(error, OSError) else None
        if self._errors_in_row >= WRITE_ERRORS_MAX or code in _POINTLESS or self.paused:
            self._paused_until = now_s + RETRY_S


class ReadWatch:
    """Counts failed reads in a row. Reads are never paused: each is a miss at worst."""

    def __init__(self) -> None:
        self.errors_in_row = 0

    @property
    def broken(self) -> bool:
        return self.errors_in_row >= READ_ERRORS_MAX


class SpaceGuard:
    """Keeps the file system from filling up. Fed with what a look at it found."""

    def __init__(self, guard_bytes: int) -> None:
        self._guard_bytes = guard_bytes
        self._free_bytes = 0
        self._occupied_bytes = 0
        self._begun_bytes = 0

    def looked(self, free_bytes: int, occupied_bytes: int) -> None:
        """``occupied_bytes``: what the bodies file takes of its file system already."""
        self._free_bytes = free_bytes
        self._occupied_bytes = occupied_bytes
        self._begun_bytes = 0

    def begun(self, size_bytes: int) -> None:
        """Slots of ``size_bytes`` in all were given out and may fill holes of the file."""
        self._begun_bytes += size_bytes

    def budget_bytes(self, used_bytes: int) -> int:
        """What may still be given out, with ``used_bytes`` of the bodies file in use.

        Below the guard that is room which the file occupies and does not use: slots are given
        out lowest first, so most of them cost no space. Some do, so half the guard ends it.
        """
        reusable = max(0, self._occupied_bytes - used_bytes)
        spare = self._free_bytes - self._guard_bytes - self._begun_bytes
        if spare >= 0:
            return spare + reusable
        return reusable if 2 * self._free_bytes >= self._guard_bytes else 0

    @property
    def near_full(self) -> bool:
        return self._free_bytes < self._guard_bytes
