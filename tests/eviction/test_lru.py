"""Least recently used, tail before head."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.world import keys

from octavo_server.cache.page_table import PageTable
from octavo_server.eviction.lru import Lru


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=12),
    st.integers(0, 40),
)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_it_agrees_with_a_list(touches: list[list[int]], count: int) -> None:
    table = PageTable()
    rows = table.add(keys(range(31)), 1, 1, 1, np.zeros(31, dtype=np.uint32))
    policy = Lru(table)
    order = list(range(31))  # those to go first at the front
    policy.touch(rows[::-1])  # the last one touched is the first to go
    for chain in touches:
        policy.touch(rows[chain])
        order = [page for page in order if page not in chain] + chain[::-1]
    victims = policy.first_victims(rows, count)
    assert victims.tolist() == rows[order][:count].tolist()


def test_it_never_ranks_a_head_before_its_tail() -> None:
    table = PageTable()
    rows = table.add(keys(range(100)), 1, 1, 1, np.arange(100, dtype=np.uint32))
    policy = Lru(table)
    policy.touch(rows)
    policy.touch(rows[:50])  # a shorter prompt of the same chain
    assert policy.first_victims(rows, 100).tolist() == rows[::-1].tolist()
    assert policy.first_victims(rows[:0], 5).tolist() == []
