"""The interface of prefix indexes.

An index maps pages to their holders. It is a hint: an entry may be stale, a page may be
missing, and neither costs more than a miss, since whoever serves a page checks key and bytes.

What keeps it close to the truth:

- Only a holder changes its own entries, in the order in which things happened to it
  (``publisher.py``). Changes of one holder carry numbers, shard by shard. A number that the
  index does not expect says that it lost something (restarted empty, restored from an old
  snapshot, failed over), and the holder compares that shard with what it has.
- An entry counts while its holder's lease runs (``holders.py``).
- Entries of retired holders are removed by whoever meets them, and by a sweep.
- A holder that is asked for a page it does not have withdraws it, as its own change. Nobody
  else removes entries of a living holder: it could have published them again meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from octavo_server.index.changes import Changes
from octavo_server.index.entries import SHARD_COUNT, Column, Keys
from octavo_server.index.errors import Trouble
from octavo_server.index.found import Found
from octavo_server.index.holders import HolderRegistry


class ShardOutcome(Enum):
    """What became of the changes in one shard."""

    APPLIED = auto()
    LOST = auto()
    """They were applied, but changes before them are missing: compare the shard."""
    LATE = auto()
    """They were not applied, since later ones were before them: compare the shard."""


@dataclass(slots=True)
class Applied:
    """What became of a batch. ``failed`` shards may or may not have taken their changes."""

    outcomes: dict[int, ShardOutcome] = field(default_factory=dict[int, ShardOutcome])
    failed: dict[int, Trouble] = field(default_factory=dict[int, Trouble])
    crowded_pages: int = 0
    """Pages that have as many holders as the index names; this one is not among them."""


@dataclass(frozen=True, slots=True)
class OwnEntries:
    """What the index says that a holder has in one shard."""

    shard: int
    number: int
    """Of the last change that the index has from the holder; 0 if none."""
    fields: Column
    units: Column


class Numbers:
    """The numbers of one holder's changes.

    Every attempt gets a number of its own, higher than all before it, and says up to which
    number the index had confirmed. So an attempt that was given up, yet arrives later than its
    repetition, is told from it and does nothing.
    """

    def __init__(self) -> None:
        self.confirmed: NDArray[np.int64] = np.zeros(SHARD_COUNT, dtype=np.int64)
        self._last = 0

    def next(self) -> int:
        """The number of a new attempt."""
        self._last += 1
        return self._last

    def confirm(self, shard: int, number: int) -> None:
        """The index has taken the changes with this number."""
        self.confirmed[shard] = number
        self._last = max(self._last, number)


class PrefixIndex(ABC):
    """Pages and their holders. Safe to call from many tasks of one event loop."""

    registry: HolderRegistry

    @abstractmethod
    async def apply(self, holder_id: int, changes: Changes, numbers: Numbers) -> Applied:
        """Makes the holder's entries what ``changes`` says, and confirms their numbers.

        At most ``BATCH_PAGES_MAX`` rows, no page twice. Each shard is changed wholly or not at
        all. Never raises for what goes wrong at the index: see ``Applied.failed``.
        """

    @abstractmethod
    async def match(self, keys: Keys, *, exact: bool = False) -> Found:
        """Who holds the longest held prefix of the chain, by the deadline of the index.

        Looks at some pages only, unless ``exact``: between two pages with the same holders it
        takes the pages between as held by them too. Presence is nearly closed under prefixes,
        and a holder that lacks such a page answers with a miss.
        """

    @abstractmethod
    async def own_entries(
        self, holder_id: int, shards: Sequence[int]
    ) -> dict[int, OwnEntries | Trouble]:
        """What the index says that the holder has in each of these shards, or why it does not."""

    @abstractmethod
    async def numbers_of(self, holder_id: int) -> NDArray[np.int64]:
        """Of the last change that the index has from the holder, shard by shard.

        0 where it has none, -1 where that cannot be read. Never raises for what goes wrong.
        """

    @abstractmethod
    async def remove_met(self) -> int:
        """Removes entries of retired holders that matches met; how many."""

    @abstractmethod
    async def remove_retired(self, shard: int, retired: frozenset[int]) -> frozenset[int]:
        """Removes all entries of ``retired`` from one shard; the ids of those that remain.

        Raises:
            IndexUnavailable: some may have been removed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Gives back connections. No call may be in progress."""
