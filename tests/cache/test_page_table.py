"""The page table's links, counts and free rows, and the walks over chains."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.cache.invariants import check_table
from tests.cache.world import keys

from octavo_server.cache.lineage import children_among, with_ancestors, with_descendants
from octavo_server.cache.page_table import NO_ROW, PageTable, Rows


def add(table: PageTable, numbers: list[int] | range, unit_count: int = 1) -> Rows:
    """A chain of new pages."""
    depths = np.arange(len(numbers), dtype=np.uint32)
    rows = table.add(keys(numbers), 1, 1, unit_count, depths)
    table.link(rows[1:], rows[:-1])
    return rows


def in_memory(table: PageTable, rows: Rows) -> None:
    table.set_memory_mask(rows, table.full_mask[rows])


def nothing(rows: Rows) -> NDArray[np.uint64]:
    return np.zeros(len(rows), dtype=np.uint64)


def test_child_counts_follow_masks_and_links() -> None:
    table = PageTable()
    rows = add(table, range(5), 2)
    in_memory(table, rows[:3])
    table.set_nvme_mask(rows[2:4], table.full_mask[rows[2:4]])
    assert table.child_rows[rows].tolist() == [1, 1, 1, 1, 0]
    assert table.memory_children[rows].tolist() == [1, 1, 0, 0, 0]
    assert table.nvme_children[rows].tolist() == [0, 1, 1, 0, 0]
    table.set_memory_mask(rows[1:2], np.array([1], dtype=np.uint64))  # a part is still a child
    assert table.memory_children[rows[0]] == 1
    branch = table.add(keys([9]), 1, 1, 1, np.array([1], dtype=np.uint32))
    in_memory(table, branch)
    table.link(branch, rows[:1])  # linked after its mask was set
    assert table.memory_children[rows[0]] == 2
    table.unlink(branch)
    assert table.memory_children[rows[0]] == 1
    check_table(table)


def test_a_row_goes_with_the_last_child_that_kept_it() -> None:
    table = PageTable()
    rows = add(table, range(6))
    in_memory(table, rows[5:])
    table.drop_unused(rows[:5])
    assert table.row_count == 6  # ghosts: what lies below them is still a chain
    assert (table.find(keys(range(6)), 1) == rows).all()
    table.pins[rows[2]] = 1
    table.set_memory_mask(rows[5:], nothing(rows[5:]))
    table.drop_unused(rows[5:])
    assert table.find(keys(range(6)), 1).tolist() == [*rows[:3].tolist(), -1, -1, -1]
    table.pins[rows[2]] = 0
    table.drop_unused(rows[2:3])
    assert table.row_count == 0
    check_table(table)


def test_a_withdrawn_row_makes_way_for_another_of_its_key() -> None:
    table = PageTable()
    old = add(table, range(3))
    in_memory(table, old)
    table.withdraw(old[[1, 1]])
    assert table.find(keys([1]), 1)[0] == NO_ROW
    new = table.add(keys([1]), 1, 1, 1, np.array([1], dtype=np.uint32))
    assert table.find(keys([1]), 1)[0] == new[0]
    check_table(table)


def test_growth_keeps_everything_and_every_array_in_place() -> None:
    table = PageTable()
    masks, offsets = table.memory_mask, table.units.memory_offset
    first = add(table, range(10), 3)
    in_memory(table, first)
    add(table, range(100, 20_000), 2)
    assert masks is table.memory_mask
    assert offsets is table.units.memory_offset
    assert len(masks) == table.capacity >= 19_910
    assert (masks[first] == 7).all()
    assert (table.find(keys(range(10)), 1) == first).all()
    check_table(table)
    table.set_memory_mask(first, nothing(first))
    table.drop_unused(table.live_rows())
    assert table.row_count == 0
    check_table(table)
    high_water, units = table.high_water, table.units.capacity
    add(table, range(30_000, 49_000), 2)
    assert (table.high_water, table.units.capacity) == (high_water, units)  # rows were reused


def test_the_last_row_is_no_stand_in_for_no_row() -> None:
    """NO_ROW is -1 and thus an index; nothing that is read through it may count."""
    table = PageTable()
    rows = add(table, range(table.capacity))
    in_memory(table, rows)
    assert table.high_water == table.capacity
    add(table, [10**6])
    table.link(np.array([rows[0]], dtype=np.int32), np.array([NO_ROW], dtype=np.int32))
    assert table.parent[rows[0]] == NO_ROW
    check_table(table)


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "memory", "nvme", "lose", "pin", "drop", "withdraw"]),
        st.integers(0, 60),
        st.integers(1, 12),
        st.integers(1, 3),
    ),
    max_size=40,
)


@given(operations)
@settings(max_examples=120, derandomize=True, deadline=None)
def test_counts_equal_a_recount_after_anything(plan: list[tuple[str, int, int, int]]) -> None:
    table = PageTable()
    for what, first, count, unit_count in plan:
        live = table.live_rows()
        if what == "add":
            known = table.find(keys(range(first, first + count)), 1)
            fresh = [first + n for n in range(count) if known[n] == NO_ROW]
            if fresh:
                add(table, fresh, unit_count)
        elif not len(live):
            continue
        else:
            rows = live[first % len(live) :][:count]
            if what == "memory":
                in_memory(table, rows)
            elif what == "nvme":
                table.set_nvme_mask(rows, table.full_mask[rows])
            elif what == "lose":
                table.set_memory_mask(rows, nothing(rows))
                table.set_nvme_mask(rows, nothing(rows))
            elif what == "pin":
                table.pins[rows] ^= 1
            elif what == "withdraw":
                table.withdraw(rows)
            else:
                table.drop_unused(rows)
        check_table(table)
    rows = table.live_rows()
    table.pins[rows] = 0
    table.set_memory_mask(rows, nothing(rows))
    table.set_nvme_mask(rows, nothing(rows))
    table.drop_unused(rows)
    assert table.row_count == 0
    check_table(table)


forests = st.integers(1, 40).flatmap(
    lambda size: st.tuples(
        st.permutations(range(3, size + 3)),
        st.lists(st.integers(-1, size), min_size=size, max_size=size),
        st.lists(st.booleans(), min_size=size, max_size=size),
        st.lists(st.booleans(), min_size=size, max_size=size),
    )
)


@given(forests)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_walks_over_chains_agree_with_walking_page_by_page(
    forest: tuple[list[int], list[int], list[bool], list[bool]],
) -> None:
    names, links, flags, passes = forest
    rows = np.array(names, dtype=np.int32)
    # Element i has one before it as its parent, or a row that is none of them.
    parents = np.array(
        [
            names[link] if 0 <= link < i else (NO_ROW if link < i else 1000)
            for i, link in enumerate(links)
        ],
        dtype=np.int32,
    )
    place = {name: i for i, name in enumerate(names)}
    above = [place.get(int(parent)) for parent in parents]
    flagged, passing = np.array(flags), np.array(passes)
    up, down = flagged.copy(), flagged.copy()
    for i in range(len(names)):
        parent = above[i]
        if parent is not None and down[parent] and passing[parent]:
            down[i] = True
    for i in reversed(range(len(names))):
        parent = above[i]
        if parent is not None and up[i]:
            up[parent] = True
    assert (with_ancestors(rows, parents, flagged) == up).all()
    assert (with_descendants(rows, parents, flagged, passing) == down).all()
    assert children_among(rows, parents).tolist() == [above.count(i) for i in range(len(names))]


def test_walks_over_nothing_answer_nothing() -> None:
    empty, flags = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
    assert len(children_among(empty, empty)) == 0
    assert len(with_ancestors(empty, empty, flags)) == 0
    assert len(with_descendants(empty, empty, flags, flags)) == 0


def test_the_longest_chain_goes_in_one_step_even_where_its_tail_stays() -> None:
    table = PageTable()
    rows = add(table, range(65_536))
    begin = time.perf_counter()
    table.pins[rows[-1]] = 1
    table.drop_unused(rows)
    assert table.row_count == 65_536  # all of it lies above a page that is needed
    table.pins[rows[-1]] = 0
    table.drop_unused(rows)
    took_s = time.perf_counter() - begin
    assert table.row_count == 0
    assert took_s < 1.0  # about 60 ms; a step per page took 4 s
