"""The prefix index on Redis: hashes as buckets of a linear hash table, one table a shard."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo_proto.limits import KEY_BYTES
from octavo_server.index.changes import BATCH_PAGES_MAX, Changes, ShardChanges, by_shard
from octavo_server.index.entries import (
    FIELD_BYTES,
    SHARD_COUNT,
    Keys,
    decode_holdings,
    encode_holder_id,
    shards_of,
)
from octavo_server.index.errors import Trouble
from octavo_server.index.found import NOT_ANSWERED, Answer, Found
from octavo_server.index.holder_view_cache import VIEW_AGE_MAX_S, HolderViewCache
from octavo_server.index.holders import HolderView
from octavo_server.index.matching import Reader
from octavo_server.index.near_cache import NearCache
from octavo_server.index.own_reading import OwnReading
from octavo_server.index.prefix_index import (
    Applied,
    Numbers,
    OwnEntries,
    PrefixIndex,
    ShardOutcome,
)
from octavo_server.index.probing import ChainProbe
from octavo_server.index.redis_link import RedisLink, ShardCall
from octavo_server.index.redis_registry import RedisRegistry
from octavo_server.index.redis_settings import RedisSettings
from octavo_server.index.scripts import APPLY, LOOK, NUMBERS, OWN, SWEEP, TAKE_OUT, Script

SCHEMA_VERSION: Final = 1
"""Part of every key: nodes that write another form of entries do not see these."""

BUCKETS_AT_ONCE: Final = 32
"""Buckets that one call of a sweep reads: about a millisecond of Redis' time."""

OWN_BUCKETS_AT_ONCE: Final = 8
"""The same for comparisons, which read several shards at a time."""

LOOK_PAGES_MAX: Final = 4096
"""Pages of one call of a match, for the same reason: 5 ms."""

MET_MAX: Final = 4096
"""Pages kept on which a match met retired holders; a sweep finds those beyond."""

_OUTCOMES: Final = (ShardOutcome.APPLIED, ShardOutcome.LOST, ShardOutcome.LATE)


class RedisIndex(PrefixIndex):
    """See ``PrefixIndex``. Give the same settings to all nodes of a cluster."""

    def __init__(
        self,
        settings: RedisSettings,
        near: NearCache | None = None,
        now: Callable[[], float] = time.monotonic,
        view_age_s: float = VIEW_AGE_MAX_S,
        link: RedisLink | None = None,
    ) -> None:
        stem = f"{settings.prefix}:{SCHEMA_VERSION}"
        self.link: Final = link or RedisLink(settings)
        self.registry = RedisRegistry(self.link, stem, now)
        self.views: Final = HolderViewCache(self.registry, now)
        self.near: Final = NearCache(now=now) if near is None else near
        self._now = now
        self._states: Final = [f"{stem}:{{{shard:02x}}}" for shard in range(SHARD_COUNT)]
        self._view_age_s = view_age_s
        self._unknown: frozenset[int] = frozenset()
        self._met: dict[bytes, set[int]] = {}

    async def apply(self, holder_id: int, changes: Changes, numbers: Numbers) -> Applied:
        assert len(changes) <= BATCH_PAGES_MAX, len(changes)
        shards = by_shard(changes)
        number = numbers.next()
        grows = b"1" if bool(changes.units.any()) else b"0"
        answers = await self.link.call_shards(
            APPLY,
            [encode_holder_id(holder_id), grows],
            [
                ShardCall(
                    self._states[each.shard],
                    _packed(each, int(numbers.confirmed[each.shard]), number),
                )
                for each in shards
            ],
            self.link.settings.write_timeout_s,
        )
        applied = Applied()
        for each, answer in zip(shards, answers, strict=True):
            if isinstance(answer, Trouble):
                applied.failed[each.shard] = answer
                continue
            outcome = _OUTCOMES[int(answer[0])]
            applied.outcomes[each.shard] = outcome
            applied.crowded_pages += int(answer[1])
            if outcome is not ShardOutcome.LATE:
                numbers.confirm(each.shard, number)
        return applied

    async def match(self, keys: Keys, *, exact: bool = False) -> Found:
        # Each call has what is left of the time, so that it is the call that times out: then
        # nobody asks the same server again at once.
        deadline_s = time.monotonic() + self.link.settings.match_timeout_s
        try:
            view = await self._view(self._view_age_s, deadline_s)
            found, strangers = await self._look_through(keys, exact, view, deadline_s)
            if strangers - self._unknown:
                # They may have registered after the view was taken.
                fresh = await self._view(0.0, deadline_s)
                if fresh is not view:
                    found, strangers = await self._look_through(keys, exact, fresh, deadline_s)
                    self._unknown = strangers
        except TimeoutError:
            self.link.troubles[Trouble.TIMEOUT] += 1
            return NOT_ANSWERED
        return found

    async def _view(self, age_s: float, deadline_s: float) -> HolderView:
        """Raises TimeoutError."""
        async with asyncio.timeout(deadline_s - time.monotonic()):
            return await self.views.at_most(age_s)

    async def own_entries(
        self, holder_id: int, shards: Sequence[int]
    ) -> dict[int, OwnEntries | Trouble]:
        found: dict[int, OwnEntries | Trouble] = {}
        reading = {shard: OwnReading(shard) for shard in shards}
        while reading:
            rows = list(reading.values())
            answers = await self.link.call_shards(
                OWN,
                [encode_holder_id(holder_id), b"%d" % OWN_BUCKETS_AT_ONCE],
                [ShardCall(self._states[each.shard], b"%d" % each.first) for each in rows],
                self.link.settings.write_timeout_s,
            )
            for each, answer in zip(rows, answers, strict=True):
                if isinstance(answer, Trouble):
                    found[each.shard] = answer
                elif each.take(OWN_BUCKETS_AT_ONCE, *answer):
                    found[each.shard] = each.entries()
            reading = {each.shard: each for each in rows if each.shard not in found}
        return found

    async def numbers_of(self, holder_id: int) -> NDArray[np.int64]:
        answers = await self.link.call_shards(
            NUMBERS,
            [encode_holder_id(holder_id)],
            [ShardCall(state, b"") for state in self._states],
            self.link.settings.write_timeout_s,
        )
        return np.array(
            [-1 if isinstance(each, Trouble) else int(each) for each in answers], dtype=np.int64
        )

    async def remove_met(self) -> int:
        met, self._met = self._met, {}
        if not met:
            return 0
        keys = np.frombuffer(b"".join(met), dtype="<u8").reshape(-1, 2)
        retired = sorted(set[int]().union(*met.values()))
        packed = b"".join(encode_holder_id(each) for each in retired)
        answers = await self.link.call_shards(
            TAKE_OUT,
            [packed],
            [ShardCall(self._states[shard], fields) for shard, fields, _ in _grouped(keys)],
            self.link.settings.write_timeout_s,
        )
        return sum(each for each in answers if not isinstance(each, Trouble))

    async def remove_retired(self, shard: int, retired: frozenset[int]) -> frozenset[int]:
        packed = b"".join(encode_holder_id(each) for each in sorted(retired))
        first, buckets = 0, 1
        met: set[int] = set()
        while first < buckets:
            arguments = [packed, b"%d" % first, b"%d" % BUCKETS_AT_ONCE]
            buckets, ids = await self._call(SWEEP, shard, arguments)
            met.update(_holder_ids(ids))
            first += BUCKETS_AT_ONCE
        return frozenset(met)

    async def close(self) -> None:
        await self.link.close()

    async def _look_through(
        self, keys: Keys, exact: bool, view: HolderView, deadline_s: float
    ) -> tuple[Found, frozenset[int]]:
        """One match with one view of the registry, and the ids met that it does not know."""
        probe = ChainProbe(len(keys), exact=exact)
        reader = Reader(view, self._now())
        calls = Counter[bool]()
        while (positions := probe.next_positions()) is not None:
            wanted = keys[positions]
            names = _names(wanted)
            values = self.near.find(names)
            unread = np.array([at for at, each in enumerate(values) if each is None], dtype=np.intp)
            for begin in range(0, len(unread), LOOK_PAGES_MAX):
                rows = unread[begin : begin + LOOK_PAGES_MAX]
                calls += await self._read(wanted, names, rows, values, deadline_s)
            codes = [reader.code(each or b"") for each in values]
            self._remember_met(names, values, reader)
            probe.take(positions, np.array(codes, dtype=np.int32))
        answer = Answer.COMPLETE
        if calls[False]:
            answer = Answer.PARTIAL if calls[True] else Answer.UNAVAILABLE
        return reader.found(probe, answer), frozenset(reader.strangers)

    async def _read(
        self,
        keys: Keys,
        names: Sequence[bytes],
        rows: NDArray[np.intp],
        values: list[bytes | None],
        deadline_s: float,
    ) -> Counter[bool]:
        """Reads ``values`` of ``keys`` in these rows; how many shards answered or not."""
        groups = _grouped(keys[rows])
        answers = await self.link.call_shards(
            LOOK,
            [],
            [ShardCall(self._states[shard], fields) for shard, fields, _ in groups],
            deadline_s - time.monotonic(),
        )
        for (_, _, order), answer in zip(groups, answers, strict=True):
            if not isinstance(answer, Trouble):
                read = [bytes(value or b"") for value in answer]
                own_rows: list[int] = rows[order].tolist()
                for row, value in zip(own_rows, read, strict=True):
                    values[row] = value
                self.near.put([names[row] for row in own_rows], read)
        return Counter(not isinstance(answer, Trouble) for answer in answers)

    def _remember_met(
        self, names: Iterable[bytes], values: Iterable[bytes | None], reader: Reader
    ) -> None:
        """Keeps where retired holders were met.

        Strangers count only if they are known to be retired: one that is in no view may have
        registered a moment ago.
        """
        retired = reader.strangers & reader.view.retired
        if not retired:
            return
        for name, value in zip(names, values, strict=True):
            if len(self._met) >= MET_MAX:
                return
            met = retired.intersection(each.holder_id for each in decode_holdings(value or b""))
            if met:
                self._met.setdefault(name, set()).update(met)

    async def _call(self, script: Script, shard: int, arguments: list[bytes]) -> Any:
        timeout_s = self.link.settings.write_timeout_s
        return await self.link.call(script, [self._states[shard]], arguments, timeout_s)


def _packed(changes: ShardChanges, confirmed: int, number: int) -> bytes:
    """What ``apply.lua`` takes for one shard."""
    partial = np.empty(len(changes.partial), dtype=[("field", "<u8"), ("units", ">u8")])
    partial["field"] = changes.partial
    partial["units"] = changes.partial_units
    counts = len(changes.whole), len(partial), len(changes.gone)
    return b"".join(
        (
            struct.pack(">QQHHH", confirmed, number, *counts),
            changes.whole.tobytes(),
            partial.tobytes(),
            changes.gone.tobytes(),
        )
    )


def _grouped(keys: Keys) -> list[tuple[int, bytes, list[int]]]:
    """(shard, its fields, their rows in ``keys``) for each shard that occurs."""
    shards = shards_of(keys)
    order = np.argsort(shards, kind="stable")
    fields = keys[order, 1].tobytes()
    cuts: list[int] = np.searchsorted(shards[order], np.arange(SHARD_COUNT + 1)).tolist()
    rows: list[int] = order.tolist()
    return [
        (shard, fields[FIELD_BYTES * begin : FIELD_BYTES * end], rows[begin:end])
        for shard, (begin, end) in enumerate(pairwise(cuts))
        if begin < end
    ]


def _names(keys: Keys) -> list[bytes]:
    """Each key as bytes."""
    raw = keys.tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def _holder_ids(packed: bytes) -> list[int]:
    return [int(each) for each in np.frombuffer(packed, dtype=">u4")]
