"""Which pages of a chain to look at: bracket, stride, refine.

Presence is nearly closed under prefixes, and neighbours mostly have the same holders. So a
chain of 8,192 pages is looked at in three rounds: pages at doubling distances, which bracket
the end of what is held (a miss costs a dozen pages); every 32nd page before that end, with
which shorter chains begin; and all pages between two neighbours that differ. What lies between
two equal ones is taken as equal.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

STRIDE_PAGES: Final = 32
"""An 8,192-page chain with four changes of holders takes 256 + 4 * 31 looks; half or twice the
stride takes more."""

BRACKET_PAGES_MIN: Final = 64 * STRIDE_PAGES
"""Chains up to this are looked at by stride at once: a call more takes longer than 64 looks."""

UNKNOWN: Final = -1
ABSENT: Final = 0


class ChainProbe:
    """One match. Codes are whatever stands for a set of holders; 0 stands for none."""

    def __init__(self, page_count: int, *, exact: bool = False) -> None:
        self.codes: NDArray[np.int32] = np.full(page_count, UNKNOWN, dtype=np.int32)
        if exact or page_count <= 2 * STRIDE_PAGES:
            self._rounds = [self._all]
        elif page_count <= BRACKET_PAGES_MIN:
            self._rounds = [self._stride, self._refine]
        else:
            self._rounds = [self._bracket, self._stride, self._refine]

    def next_positions(self) -> Positions | None:
        """Pages to look at now, ascending, perhaps none; None when nothing is left to do."""
        if not self._rounds:
            return None
        wanted = self._rounds.pop(0)()
        unknown: Positions = wanted[self.codes[wanted] == UNKNOWN]
        return unknown

    def take(self, positions: Positions, codes: NDArray[np.int32]) -> None:
        """What was found there."""
        self.codes[positions] = codes

    def runs(self) -> list[tuple[int, int, int]]:
        """(begin, end, code) without gaps from page 0 up to the first page nobody holds."""
        known = self._known()
        end = self._end()
        if not end:
            return []
        # An unknown page lies between two equal ones, so it takes after the one behind it.
        following = known[np.searchsorted(known, np.arange(end))]
        codes = self.codes[following]
        begins = np.flatnonzero(np.diff(codes, prepend=codes[0] - 1))
        ends = np.append(begins[1:], end)
        return list(zip(begins.tolist(), ends.tolist(), codes[begins].tolist(), strict=True))

    def _all(self) -> Positions:
        return np.arange(len(self.codes))

    def _bracket(self) -> Positions:
        last = len(self.codes) - 1
        doubling = [0, STRIDE_PAGES - 1]
        while doubling[-1] < last:
            doubling.append(2 * doubling[-1] + 1)
        return np.array([*doubling[:-1], last], dtype=np.int64)

    def _stride(self) -> Positions:
        ends = [0, len(self.codes) - 1]
        strides = np.arange(STRIDE_PAGES - 1, self._end(), STRIDE_PAGES)
        found: Positions = np.union1d(strides, ends).astype(np.int64)
        return found

    def _refine(self) -> Positions:
        """What lies between neighbours that differ, up to the first that is absent."""
        known = self._known()
        known = known[: np.searchsorted(known, self._end()) + 1]
        differ: list[int] = np.flatnonzero(np.diff(self.codes[known])).tolist()
        gaps: list[Positions] = [np.arange(known[at] + 1, known[at + 1]) for at in differ]
        return np.concatenate(gaps) if gaps else np.empty(0, dtype=np.int64)

    def _known(self) -> Positions:
        return np.flatnonzero(self.codes != UNKNOWN)

    def _end(self) -> int:
        """The first page known to be absent, else the page count."""
        absent = np.flatnonzero(self.codes == ABSENT)
        return int(absent[0]) if len(absent) else len(self.codes)
