"""The key index beside a dict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo_server.cache.key_index import KeyIndex

ROWS = 6000


@dataclass(slots=True)
class Columns:
    key_low: NDArray[np.uint64]
    key_high: NDArray[np.uint64]
    namespace: NDArray[np.int32]


def columns(seed: int, *, same_low: bool = False) -> Columns:
    """Distinct keys, some of which differ in one half or in their namespace only."""
    random = np.random.default_rng(seed)
    numbers = np.arange(ROWS, dtype=np.uint64)
    low = np.zeros(ROWS, dtype=np.uint64) if same_low else numbers // np.uint64(4)
    high = numbers if same_low else numbers // np.uint64(2) % np.uint64(2)
    if not same_low:
        high = random.integers(0, 2**63, dtype=np.uint64) + high
    return Columns(low, high, (numbers % np.uint64(2)).astype(np.int32))


def check(index: KeyIndex, data: Columns, live: set[int]) -> None:
    assert len(index) == len(live)
    found = index.find_columns(data.key_low, data.key_high, data.namespace)
    expected = np.array([row if row in live else -1 for row in range(ROWS)], dtype=np.int32)
    assert (found == expected).all()


batches = st.lists(
    st.tuples(st.booleans(), st.integers(0, ROWS - 1), st.integers(1, 900)),
    min_size=1,
    max_size=25,
)


@given(batches, st.integers(0, 3), st.booleans())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_it_agrees_with_a_dict_through_growth_and_tombstones(
    plan: list[tuple[bool, int, int]], seed: int, same_low: bool
) -> None:
    data = columns(seed, same_low=same_low)
    index = KeyIndex(data)
    live: set[int] = set()
    for insert, first, count in plan:
        span = set(range(first, min(first + count, ROWS)))
        chosen = sorted(span - live if insert else span & live)
        rows = np.array(chosen, dtype=np.int32)
        if insert:
            index.insert(rows)
            live |= set(chosen)
        else:
            index.remove(rows)
            live -= set(chosen)
        check(index, data, live)


def test_churn_far_beyond_its_size_keeps_it_small_and_right() -> None:
    data = columns(1)
    index = KeyIndex(data)
    rows = np.arange(400, dtype=np.int32)
    index.insert(rows)
    for turn in range(300):  # tombstones are swept up by rebuilding
        gone = np.array([turn % 400, (turn + 7) % 400], dtype=np.int32)
        index.remove(gone)
        index.insert(gone)
    check(index, data, set(range(400)))
    slots = index._slots  # pyright: ignore[reportPrivateUsage]
    assert len(slots) == 1024


def test_keys_with_one_home_are_all_found() -> None:
    data = columns(1)
    index = KeyIndex(data)
    index._factors = (np.uint64(0), np.uint64(0))  # pyright: ignore[reportPrivateUsage]
    rows = np.arange(300, dtype=np.int32)
    index.insert(rows)  # each of them belongs at the same place
    check(index, data, set(range(300)))
    index.remove(rows[::3])
    check(index, data, set(range(300)) - set(range(0, 300, 3)))
    index.insert(rows[::3])
    check(index, data, set(range(300)))


def test_nothing_is_found_of_nothing() -> None:
    index = KeyIndex(columns(1))
    assert index.find(np.empty((0, 2), dtype=np.uint64), 1).tolist() == []
    index.insert(np.empty(0, dtype=np.int32))
    index.remove(np.empty(0, dtype=np.int32))
    assert len(index) == 0


def test_removing_what_is_not_there_is_a_mistake() -> None:
    index = KeyIndex(columns(1))
    with pytest.raises(AssertionError, match="not in the index"):
        index.remove(np.array([3], dtype=np.int32))
