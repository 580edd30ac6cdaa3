"""What an NVMe store is told, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

READ_DEPTH: Final = 16
"""Reads in flight. 320 KiB reads by 16 threads are level with fio's io_uring at that depth."""

WRITE_DEPTH: Final = 8
"""Writes in flight. More gained nothing where it was measured, and would delay reads."""

SLAB_BYTES: Final = 64 << 20
FREE_SPACE_GUARD_BYTES: Final = 1 << 30


class StoreError(Exception):
    """The store can't be opened; the message says what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeConfig:
    """``capacity_bytes`` bounds the bodies; the log adds about 200 bytes per unit.

    ``slab_bytes`` is for a store that is made now; one that exists keeps its own.

    ``free_space_guard_bytes`` is what the store leaves free on its file system.
    """

    directory: Path
    capacity_bytes: int
    slab_bytes: int = SLAB_BYTES
    free_space_guard_bytes: int = FREE_SPACE_GUARD_BYTES
    read_depth: int = READ_DEPTH
    write_depth: int = WRITE_DEPTH
