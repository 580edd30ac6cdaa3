"""How an arena is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_proto.limits import SEGMENTS_MAX
from octavo_server.sizing import (
    SLAB_BYTES_MAX,
    SLAB_BYTES_MIN,
    SLABS_WANTED,
    arena_shape,
    nvme_slab_bytes,
)
from octavo_server.store.slabs import SLOT_ALIGN_BYTES

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@given(st.integers(1, 4 * TIB))
@settings(max_examples=300, derandomize=True)
def test_every_size_gives_a_sound_shape(memory_bytes: int) -> None:
    shape = arena_shape(memory_bytes)
    assert shape.memory_bytes >= memory_bytes
    assert shape.memory_bytes % shape.segment_bytes == 0
    assert shape.segment_bytes % shape.slab_bytes == 0
    assert shape.slab_bytes % SLOT_ALIGN_BYTES == 0
    assert SLAB_BYTES_MIN <= shape.slab_bytes <= SLAB_BYTES_MAX
    assert shape.memory_bytes // shape.segment_bytes <= SEGMENTS_MAX
    # Rounding up costs less than one slab a segment.
    assert shape.memory_bytes - memory_bytes < shape.slab_bytes * SEGMENTS_MAX


def test_usual_sizes_are_cut_as_documented() -> None:
    assert arena_shape(64 * MIB).slab_bytes == MIB
    assert arena_shape(8 * GIB).slab_bytes == SLAB_BYTES_MAX
    assert arena_shape(8 * GIB).segment_bytes == GIB
    assert arena_shape(512 * GIB).segment_bytes == 8 * GIB
    for memory_bytes in (64 * MIB, GIB, 8 * GIB):
        shape = arena_shape(memory_bytes)
        assert shape.memory_bytes == memory_bytes
        assert shape.memory_bytes // shape.slab_bytes >= SLABS_WANTED


def test_what_the_settings_name_is_kept() -> None:
    shape = arena_shape(100 * MIB, segment_bytes=32 * MIB, slab_bytes=MIB + 1)
    assert shape.slab_bytes == MIB + 4 * KIB
    assert shape.segment_bytes % shape.slab_bytes == 0
    assert shape.segment_bytes >= 32 * MIB
    assert shape.memory_bytes >= 100 * MIB


def test_an_nvme_store_takes_every_unit_that_memory_takes() -> None:
    assert nvme_slab_bytes(100 * GIB, MIB) == SLAB_BYTES_MAX
    assert nvme_slab_bytes(2 * GIB, 4 * MIB) == 32 * MIB
    assert nvme_slab_bytes(256 * MIB, 64 * MIB) == 64 * MIB
