"""Slots within slabs, beside a dict of what is taken."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_server.store.slabs import SLOT_ALIGN_BYTES, SlabAllocator, sizes_of_slots

SLAB = 4 * SLOT_ALIGN_BYTES
SLABS = 6

lengths = st.integers(1, SLAB + SLOT_ALIGN_BYTES)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), lengths, st.integers(0, 12)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.integers(1, 8)),
    ),
    max_size=60,
)


def check(slabs: SlabAllocator, taken: dict[int, int]) -> None:
    """``taken``: offset → slot bytes."""
    spans = sorted(taken.items())
    for (offset, size), (after, _) in pairwise(spans):
        assert offset + size <= after, "slots overlap"
    assert all(offset // SLAB == (offset + size - 1) // SLAB for offset, size in spans)
    assert all(offset + size <= slabs.capacity_bytes for offset, size in spans)
    assert slabs.used_bytes == sum(taken.values())
    used_slabs = {offset // SLAB for offset in taken}
    assert slabs.unassigned_bytes == slabs.capacity_bytes - len(used_slabs) * SLAB
    sizes = {
        slab: {size for offset, size in spans if offset // SLAB == slab} for slab in used_slabs
    }
    assert all(len(classes) == 1 for classes in sizes.values()), "a slab of two classes"


@given(operations)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_slots_never_overlap_and_the_books_balance(plan: list[tuple[str, int, int]]) -> None:
    slabs = SlabAllocator(SLABS * SLAB + 100, SLAB)
    taken: dict[int, int] = {}
    for what, number, count in plan:
        if what == "allocate":
            offsets = slabs.allocate(number, count).tolist()
            size = slabs.slot_bytes(number)
            assert not taken.keys() & set(offsets)
            taken.update(dict.fromkeys(offsets, size))
            if len(offsets) < count:  # then there was no more room for this size
                free_slabs = SLABS - len({offset // SLAB for offset in taken})
                assert size > SLAB or not free_slabs
                mine = [offset for offset, other in taken.items() if other == size]
                per_slab = SLAB // size
                assert len(mine) == per_slab * len({offset // SLAB for offset in mine})
        elif taken:
            chosen = sorted(taken)[number % len(taken) :][:count]
            slabs.free(np.array(chosen, dtype=np.int64))
            for offset in chosen:
                del taken[offset]
        check(slabs, taken)


@given(operations, st.randoms(use_true_random=False))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_adopting_what_was_taken_gives_the_same_allocator(
    plan: list[tuple[str, int, int]], random: Random
) -> None:
    before = SlabAllocator(SLABS * SLAB, SLAB)
    taken: dict[int, int] = {}
    for what, number, count in plan:
        if what == "allocate":
            for offset in before.allocate(number, count).tolist():
                taken[offset] = number
        elif taken:
            chosen = sorted(taken)[number % len(taken) :][:count]
            before.free(np.array(chosen, dtype=np.int64))
            for offset in chosen:
                del taken[offset]
    after = SlabAllocator(SLABS * SLAB, SLAB)
    order = list(taken)
    random.shuffle(order)
    adopted = after.adopt(
        np.array(order, dtype=np.int64),
        np.array([taken[offset] for offset in order], dtype=np.uint32),
    )
    assert adopted.all()
    assert after.used_bytes == before.used_bytes
    for length in (1, SLOT_ALIGN_BYTES + 1, SLAB):
        assert after.allocate(length, 50).tolist() == before.allocate(length, 50).tolist()


def test_adopt_refuses_what_contradicts_itself_or_the_room() -> None:
    slabs = SlabAllocator(2 * SLAB, SLAB)
    rows = [
        (0, 4096, True),
        (0, 4096, False),  # twice
        (4096, 8192, False),  # another class than its slab
        (8192, 100, True),
        (SLAB, SLAB + 1, False),  # larger than a slab
        (SLAB + 100, 4096, False),  # between two slots
        (2 * SLAB, 4096, False),  # beyond the room
        (-4096, 4096, False),
        (SLAB, 0, False),  # of no bytes
        (SLAB, SLAB, True),
    ]
    adopted = slabs.adopt(
        np.array([offset for offset, _, _ in rows], dtype=np.int64),
        np.array([length for _, length, _ in rows], dtype=np.uint32),
    )
    assert adopted.tolist() == [expected for _, _, expected in rows]
    assert slabs.used_bytes == 2 * 4096 + SLAB


def test_a_double_free_is_noticed() -> None:
    slabs = SlabAllocator(SLAB, SLAB)
    offsets = slabs.allocate(4096, 2)
    slabs.free(offsets[:1])
    with pytest.raises(AssertionError, match="double free"):
        slabs.free(offsets[:1])
    slabs.free(offsets[1:])
    with pytest.raises(AssertionError, match="holds no slots"):
        slabs.free(offsets[1:])


def test_absurd_sizes_get_no_slot() -> None:
    slabs = SlabAllocator(2 * SLAB, SLAB)
    assert len(slabs.allocate(SLAB + 1, 1)) == len(slabs.allocate(0, 1)) == 0
    assert len(slabs.allocate(4096, 0)) == len(slabs.allocate(4096, -1)) == 0
    assert slabs.used_bytes == 0
    for size in (0, -4096, 100):
        with pytest.raises(ValueError, match="multiple of 4096"):
            SlabAllocator(SLAB, size)


def test_sizes_of_slots_round_up_in_64_bits() -> None:
    lengths = np.array([1, 4096, 4097, 2**32 - 1], dtype=np.uint32)
    assert sizes_of_slots(lengths).tolist() == [4096, 4096, 8192, 2**32]
