"""A prefix index in this process: for one node alone, for tests and for simulations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo_server.index.changes import BATCH_PAGES_MAX, Changes, by_shard
from octavo_server.index.entries import (
    SHARD_COUNT,
    VALUE_BYTES_MAX,
    Holding,
    Keys,
    decode_holdings,
    encode_holdings,
    shards_of,
)
from octavo_server.index.errors import Trouble
from octavo_server.index.found import Answer, Found
from octavo_server.index.local_registry import LocalRegistry
from octavo_server.index.matching import Reader
from octavo_server.index.prefix_index import (
    Applied,
    Numbers,
    OwnEntries,
    PrefixIndex,
    ShardOutcome,
)
from octavo_server.index.probing import ChainProbe


class LocalIndex(PrefixIndex):
    """The same entries as on Redis, in a dict a shard. Loses nothing unless it is told to."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.registry = LocalRegistry(now)
        self._now = now
        self._entries: list[dict[int, bytes]] = [{} for _ in range(SHARD_COUNT)]
        self._numbers: list[dict[int, int]] = [{} for _ in range(SHARD_COUNT)]

    async def apply(self, holder_id: int, changes: Changes, numbers: Numbers) -> Applied:
        assert len(changes) <= BATCH_PAGES_MAX, len(changes)
        applied = Applied()
        number = numbers.next()
        for part in by_shard(changes):
            had = self._numbers[part.shard].get(holder_id, 0)
            if had >= number:
                applied.outcomes[part.shard] = ShardOutcome.LATE
                continue
            is_lost = had < numbers.confirmed[part.shard]
            applied.outcomes[part.shard] = ShardOutcome.LOST if is_lost else ShardOutcome.APPLIED
            for field in part.whole.tolist():
                applied.crowded_pages += not self._put(part.shard, field, Holding(holder_id))
            for field, units in zip(
                part.partial.tolist(), part.partial_units.tolist(), strict=True
            ):
                applied.crowded_pages += not self._put(part.shard, field, Holding(holder_id, units))
            for field in part.gone.tolist():
                self._take_out(part.shard, field, frozenset((holder_id,)))
            self._numbers[part.shard][holder_id] = number
            numbers.confirm(part.shard, number)
        return applied

    async def match(self, keys: Keys, *, exact: bool = False) -> Found:
        probe = ChainProbe(len(keys), exact=exact)
        reader = Reader(await self.registry.view(), self._now())
        shards: list[int] = shards_of(keys).tolist()
        fields: list[int] = keys[:, 1].tolist()
        while (positions := probe.next_positions()) is not None:
            rows: list[int] = positions.tolist()
            codes = [reader.code(self._entries[shards[at]].get(fields[at], b"")) for at in rows]
            probe.take(positions, np.array(codes, dtype=np.int32))
        return reader.found(probe, Answer.COMPLETE)

    async def own_entries(
        self, holder_id: int, shards: Sequence[int]
    ) -> dict[int, OwnEntries | Trouble]:
        return {shard: self._own_entries(holder_id, shard) for shard in shards}

    def _own_entries(self, holder_id: int, shard: int) -> OwnEntries:
        own = {
            field: holding.units
            for field, value in self._entries[shard].items()
            for holding in decode_holdings(value)
            if holding.holder_id == holder_id
        }
        return OwnEntries(
            shard,
            self._numbers[shard].get(holder_id, 0),
            np.array(list(own), dtype=np.uint64),
            np.array(list(own.values()), dtype=np.uint64),
        )

    async def numbers_of(self, holder_id: int) -> NDArray[np.int64]:
        return np.array([each.get(holder_id, 0) for each in self._numbers], dtype=np.int64)

    async def remove_met(self) -> int:
        return 0

    async def remove_retired(self, shard: int, retired: frozenset[int]) -> frozenset[int]:
        for field in list(self._entries[shard]):
            self._take_out(shard, field, retired)
        for holder_id in retired:
            self._numbers[shard].pop(holder_id, None)
        return frozenset(
            holding.holder_id
            for value in self._entries[shard].values()
            for holding in decode_holdings(value)
        )

    async def close(self) -> None:
        pass

    def lose(self, shard: int) -> None:
        """As a server that restarted empty, for tests and simulations."""
        self._entries[shard].clear()
        self._numbers[shard].clear()

    def _put(self, shard: int, field: int, holding: Holding) -> bool:
        """Whether there was room; if not the holder is not named at all."""
        entries = self._entries[shard]
        others = tuple(
            each
            for each in decode_holdings(entries.get(field, b""))
            if each.holder_id != holding.holder_id
        )
        value = encode_holdings((*others, holding))
        fits = len(value) <= VALUE_BYTES_MAX
        entries[field] = value if fits else encode_holdings(others)
        return fits

    def _take_out(self, shard: int, field: int, unwanted: frozenset[int]) -> None:
        entries = self._entries[shard]
        rest = tuple(
            each
            for each in decode_holdings(entries.get(field, b""))
            if each.holder_id not in unwanted
        )
        if rest:
            entries[field] = encode_holdings(rest)
        else:
            entries.pop(field, None)
