"""Looking at some pages finds what looking at all of them finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo_server.index.probing import STRIDE_PAGES, ChainProbe


def probe(
    truth: NDArray[np.int32], *, exact: bool = False
) -> tuple[list[tuple[int, int, int]], int]:
    """The runs found, and how many pages were looked at."""
    chain = ChainProbe(len(truth), exact=exact)
    looked = 0
    while (positions := chain.next_positions()) is not None:
        assert len(set(positions.tolist())) == len(positions)
        looked += len(positions)
        chain.take(positions, truth[positions])
    return chain.runs(), looked


def runs_of(truth: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """By looking at every page."""
    found: list[tuple[int, int, int]] = []
    for page, code in enumerate(truth.tolist()):
        if code == 0:
            break
        if found and found[-1][2] == code:
            found[-1] = (found[-1][0], page + 1, code)
        else:
            found.append((page, page + 1, code))
    return found


@given(
    st.integers(0, 3000),
    st.lists(st.integers(0, 3000), max_size=6),
    st.booleans(),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_nested_holders_are_found_exactly(pages: int, ends: list[int], exact: bool) -> None:
    # Each holder has a prefix, so what holds a page is the number of prefixes that reach it.
    truth = np.zeros(pages, dtype=np.int32)
    for end in ends:
        truth[:end] += 1
    assert probe(truth, exact=exact)[0] == runs_of(truth)


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 500))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_exact_looks_see_every_page(codes: list[int], more: int) -> None:
    truth = np.array(codes + [1] * more, dtype=np.int32)
    assert probe(truth, exact=True)[0] == runs_of(truth)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=700))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_runs_never_say_more_than_their_ends_do(codes: list[int]) -> None:
    # Holders that are no prefixes: what lies between two equal pages is taken as equal, and
    # nothing else is.
    truth = np.array(codes, dtype=np.int32)
    at = 0
    for begin, end, code in probe(truth)[0]:
        assert begin == at
        assert end > begin
        assert truth[begin] == code or truth[end - 1] == code
        assert (truth[begin:end] == code).any()
        at = end


@pytest.mark.parametrize(
    ("pages", "held", "looks_max"),
    [
        (8192, 0, 12),
        (8192, 94, 45),
        (8192, 8192, 260),
        (8192, 8191, 300),
        (640, 640, 25),
        (1, 1, 1),
    ],
)
def test_few_pages_are_looked_at(pages: int, held: int, looks_max: int) -> None:
    truth = np.zeros(pages, dtype=np.int32)
    truth[:held] = 7
    runs, looked = probe(truth)
    assert runs == ([(0, held, 7)] if held else [])
    assert looked <= looks_max


def test_short_chains_are_looked_at_whole() -> None:
    truth = np.array([1, 2] * STRIDE_PAGES, dtype=np.int32)
    runs, looked = probe(truth)
    assert looked == len(truth)
    assert len(runs) == len(truth)
