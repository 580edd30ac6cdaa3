"""Batches of what changed at a holder: which units of which pages it has now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from octavo_server.index.entries import ALL_UNITS, SHARD_COUNT, Column, Keys, shards_of

BATCH_PAGES_MAX: Final = 2048
"""Pages of one call to an index: about 6 ms of Redis' one thread, for which all others wait."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Row i says: of page ``keys[i]`` the holder has ``units[i]`` now, 0 being none.

    A change is a state and no step, so that saying it twice does no harm.
    """

    keys: Keys
    units: Column

    def __post_init__(self) -> None:
        assert self.keys.shape == (len(self.units), 2), self.keys.shape

    def __len__(self) -> int:
        return len(self.units)

    @classmethod
    def published(cls, keys: Keys, units: Column | None = None) -> Self:
        """The holder has these pages, whole unless ``units`` says otherwise."""
        if units is None:
            units = np.full(len(keys), ALL_UNITS, dtype=np.uint64)
        return cls(keys, units)

    @classmethod
    def withdrawn(cls, keys: Keys) -> Self:
        """The holder has nothing of these pages any more."""
        return cls(keys, np.zeros(len(keys), dtype=np.uint64))

    def where(self, chosen: NDArray[np.bool_]) -> Changes:
        """The chosen rows."""
        return Changes(self.keys[chosen], self.units[chosen])

    def batches(self) -> Iterator[Changes]:
        """The same in pieces that one call may carry."""
        for begin in range(0, len(self), BATCH_PAGES_MAX):
            end = begin + BATCH_PAGES_MAX
            yield Changes(self.keys[begin:end], self.units[begin:end])


NO_CHANGES: Final = Changes(np.empty((0, 2), dtype=np.uint64), np.empty(0, dtype=np.uint64))


def joined(parts: Sequence[Changes]) -> Changes:
    """All rows, in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_CHANGES
    return Changes(
        np.concatenate([each.keys for each in parts]),
        np.concatenate([each.units for each in parts]),
    )


def latest(changes: Changes) -> Changes:
    """The last row of each page; order is lost, and does not matter any more."""
    backwards = np.ascontiguousarray(changes.keys[::-1])
    names = backwards.view(np.dtype("V16")).reshape(-1)
    _, first = np.unique(names, return_index=True)
    if len(first) == len(changes):
        return changes
    rows = len(changes) - 1 - first
    return Changes(changes.keys[rows], changes.units[rows])


@dataclass(frozen=True, slots=True)
class ShardChanges:
    """The changes in one shard, by what is written: fields are the keys' high words."""

    shard: int
    whole: Column
    partial: Column
    partial_units: Column
    gone: Column


def by_shard(changes: Changes) -> list[ShardChanges]:
    """Rows sorted into their shards; shards without any are left out."""
    shards = shards_of(changes.keys)
    # 0 whole, 1 partial, 2 gone: rows of a shard lie in this order, so two cuts part them.
    kinds = np.where(changes.units == ALL_UNITS, 0, np.where(changes.units == 0, 2, 1))
    ranks = shards.astype(np.int64) * 3 + kinds
    order = np.argsort(ranks, kind="stable")
    fields = changes.keys[order, 1]
    units = changes.units[order]
    cuts: list[int] = np.searchsorted(ranks[order], np.arange(SHARD_COUNT * 3 + 1)).tolist()
    found: list[ShardChanges] = []
    for shard in range(SHARD_COUNT):
        begin, partial, gone, end = cuts[3 * shard : 3 * shard + 4]
        if begin < end:
            found.append(
                ShardChanges(
                    shard,
                    whole=fields[begin:partial],
                    partial=fields[partial:gone],
                    partial_units=units[partial:gone],
                    gone=fields[gone:end],
                )
            )
    return found
