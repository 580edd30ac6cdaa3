"""Status and tier of pages and units, by the protocol's numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class Status(IntEnum):
    """What became of one page or unit of a call. Meanings stand in ``octavo/v1/cache.proto``."""

    STORED = 1
    ALREADY_PRESENT = 2
    PENDING = 3
    RESERVED = 4
    QUOTA_EXCEEDED = 5
    TOO_LARGE = 6
    NO_ROOM = 7
    REJECTED = 8
    EXPIRED = 9
    MISSING = 10
    CORRUPT = 11
    UNAVAILABLE = 12
    GRANTED = 13
    DONE = 14


class Tier(IntEnum):
    """Where pages lie. ``UNKNOWN`` is one that this client has no opinion about."""

    UNKNOWN = 0
    MEMORY = 1
    NVME = 2
    PEER = 3
    DEVICE = 4

    @classmethod
    def of(cls, number: int) -> Tier:
        """The tier of a protocol number, ``UNKNOWN`` for one that is newer than this client."""
        return cls(number) if number in cls._value2member_map_ else cls.UNKNOWN


_KNOWN: Final = np.zeros(256, dtype=np.bool_)
_KNOWN[[int(status) for status in Status]] = True


def known_statuses(column: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy in which every number this client does not know has become ``REJECTED``."""
    return np.where(_KNOWN[column], column, np.uint8(Status.REJECTED)).astype(np.uint8)


def counts_by_status(column: NDArray[np.uint8]) -> dict[Status, int]:
    """How often each status occurs in a column of known statuses."""
    values, counts = np.unique(column, return_counts=True)
    return {Status(int(value)): int(count) for value, count in zip(values, counts, strict=True)}
