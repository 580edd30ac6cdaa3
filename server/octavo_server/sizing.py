"""How an arena of a given size is cut, where the settings leave it open. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from octavo_proto.limits import SEGMENTS_MAX
from octavo_server.store.slabs import SLOT_ALIGN_BYTES

SLAB_BYTES_MIN: Final = 256 << 10
SLAB_BYTES_MAX: Final = 64 << 20
"""The largest unit is one slab: 64 MiB holds a 256-token page of a 70B model at 16 bits."""

SLABS_WANTED: Final = 64
"""Enough that a few size classes can live side by side."""

SEGMENT_BYTES_WANTED: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Bytes of the whole arena, of a segment and of a slab; each divides the one before."""

    memory_bytes: int
    segment_bytes: int
    slab_bytes: int


def arena_shape(
    memory_bytes: int, segment_bytes: int | None = None, slab_bytes: int | None = None
) -> ArenaShape:
    """At least ``memory_bytes``, in whole segments of whole slabs."""
    if slab_bytes is None:
        wanted = min(max(memory_bytes // SLABS_WANTED, SLAB_BYTES_MIN), SLAB_BYTES_MAX)
        slab_bytes = 1 << (wanted.bit_length() - 1)
    slab_bytes = _whole(slab_bytes, SLOT_ALIGN_BYTES)
    if segment_bytes is None:
        segment_bytes = max(SEGMENT_BYTES_WANTED, -(-memory_bytes // SEGMENTS_MAX))
        segment_bytes = min(segment_bytes, memory_bytes)
    segment_bytes = _whole(segment_bytes, slab_bytes)
    return ArenaShape(_whole(memory_bytes, segment_bytes), segment_bytes, slab_bytes)


def nvme_slab_bytes(nvme_bytes: int, arena_slab_bytes: int) -> int:
    """Bytes of a slab of a new NVMe store: whatever fits the arena has to fit it too."""
    wanted = min(max(nvme_bytes // SLABS_WANTED, SLAB_BYTES_MIN), SLAB_BYTES_MAX)
    return max(1 << (wanted.bit_length() - 1), arena_slab_bytes)


def _whole(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes
