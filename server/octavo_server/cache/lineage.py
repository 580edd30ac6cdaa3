"""What follows from one page for the pages above and below it, without a step per page.

Chains are tens of thousands of pages long, and the event loop can't walk them: these
functions double their stride with each step, so that a chain of 65,536 pages takes 17.
Pure: rows and parents in, flags out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]
Flags = NDArray[np.bool_]


def children_among(rows: Rows, parents: Rows) -> NDArray[np.int64]:
    """For each of ``rows`` (which differ) how many of the others have it as their parent."""
    places = _places(rows, parents)
    return np.bincount(places, minlength=len(rows) + 1)[: len(rows)]


def with_ancestors(rows: Rows, parents: Rows, flagged: Flags) -> Flags:
    """Which of ``rows`` (which differ) are flagged, or lie above a flagged one.

    ``parents`` is the parent of each. A line ends where a parent is none of ``rows``.
    """
    if not flagged.any():
        return flagged
    above = np.append(_places(rows, parents), len(rows))
    marked = np.append(flagged, np.False_)
    while True:
        marked[above[marked]] = True
        marked[-1] = False
        if (above == len(rows)).all():
            return np.asarray(marked[:-1])
        above = above[above]


def with_descendants(rows: Rows, parents: Rows, flagged: Flags, passes: Flags) -> Flags:
    """Which of ``rows`` (which differ) are flagged, or lie below a flagged one.

    Only a row that ``passes`` hands it on to its children.
    """
    above = np.append(_places(rows, parents), len(rows))
    passing = np.append(passes, np.False_)
    above[~passing[above]] = len(rows)
    marked = np.append(flagged, np.False_)
    while True:
        marked |= marked[above]
        if (above == len(rows)).all():
            return np.asarray(marked[:-1])
        above = above[above]


def _places(rows: Rows, parents: Rows) -> NDArray[np.int64]:
    """Index in ``rows`` of each parent; ``len(rows)`` where it is none of them."""
    if not len(rows):
        return np.empty(0, dtype=np.int64)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    places = np.minimum(np.searchsorted(ordered, parents), len(rows) - 1)
    found = ordered[places] == parents
    return np.where(found, order[places], len(rows))
