"""What a match answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from octavo_server.index.entries import ALL_UNITS, Holding
from octavo_server.index.holders import Holder


class Answer(Enum):
    """How much of the index could be asked."""

    COMPLETE = auto()
    PARTIAL = auto()
    """A part of the index did not answer; its pages count as missing."""
    UNAVAILABLE = auto()
    """Nothing was learnt, within the deadline or because the index is known to be away."""


@dataclass(frozen=True, slots=True)
class Run:
    """Pages [begin, end) of the chain, all with the same live holders: at least one."""

    begin: int
    end: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix of a chain that somebody holds, in runs without gaps from page 0.

    A hint: by the time it is used a page may be gone, or its holder.
    """

    runs: tuple[Run, ...]
    holders: Mapping[int, Holder]
    """Those whom the runs name, by holder id."""
    answer: Answer = Answer.COMPLETE

    @property
    def page_count(self) -> int:
        """Pages of the prefix."""
        return self.runs[-1].end if self.runs else 0

    def pages_with(self, units: int) -> int:
        """Pages of the prefix whose holders together have all of ``units`` (a mask)."""
        pages = 0
        for run in self.runs:
            had = 0
            for holding in run.holdings:
                had |= holding.units
            if units & ~had & ALL_UNITS:
                break
            pages = run.end
        return pages


NOT_ANSWERED: Final = Found((), {}, Answer.UNAVAILABLE)
