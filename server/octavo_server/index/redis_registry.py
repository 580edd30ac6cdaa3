"""The registry of holders on Redis, by Redis' clock."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from octavo_server.index.entries import encode_holder_id
from octavo_server.index.errors import IndexUnavailable, Trouble
from octavo_server.index.holders import (
    HOLDERS_MAX,
    Holder,
    HolderRegistry,
    HolderView,
    LeaseTerms,
    Renewal,
    draw_holder_ids,
)
from octavo_server.index.redis_link import RedisLink
from octavo_server.index.scripts import REGISTRY

_PARTS: Final = ("records", "names", "leases", "ends", "retired")


class RedisRegistry(HolderRegistry):
    """Five keys in one slot; every operation is one script call."""

    def __init__(self, link: RedisLink, stem: str, now: Callable[[], float] = time.monotonic):
        self._link = link
        self._now = now
        self._keys = [f"{stem}:{{holders}}:{part}" for part in _PARTS]

    async def register(self, holder: Holder, terms: LeaseTerms) -> int | None:
        found = await self._act(
            "register",
            holder.name.encode(),
            holder.incarnation.encode(),
            holder.encode(),
            *_milliseconds(terms),
            b"%d" % HOLDERS_MAX,
            *(encode_holder_id(each) for each in draw_holder_ids()),
        )
        if found == b"full!":
            raise IndexUnavailable(Trouble.REFUSED, f"there are {HOLDERS_MAX} holders")
        return None if found == b"superseded" else _holder_id(found)

    async def renew(self, holder_id: int, holder: Holder, terms: LeaseTerms) -> Renewal:
        name = holder.name.encode()
        found: bytes = await self._act(
            "renew",
            encode_holder_id(holder_id),
            name,
            b"%d" % holder.started_ms,
            *_milliseconds(terms),
        )
        return Renewal[found.decode().upper()]

    async def retire(self, holder_id: int) -> None:
        await self._act("retire", encode_holder_id(holder_id))

    async def view(self) -> HolderView:
        asked_s = self._now()
        now_ms, leases, records, retired = await self._act("view")
        # Time on the way counts against the leases, never for them.
        lapses_s = {
            _holder_id(holder_id): asked_s + (float(end_ms) - now_ms) / 1e3
            for holder_id, end_ms in _pairs(leases)
        }
        holders = {_holder_id(key): Holder.decode(record) for key, record in _pairs(records)}
        return HolderView(holders, lapses_s, frozenset(map(_holder_id, retired)), asked_s)

    async def retire_lapsed(self) -> None:
        await self._act("retire_lapsed")

    async def bury(self, holder_ids: frozenset[int]) -> None:
        if holder_ids:
            await self._act("bury", *(encode_holder_id(each) for each in sorted(holder_ids)))

    async def _act(self, act: str, *arguments: bytes) -> Any:
        timeout_s = self._link.settings.write_timeout_s
        return await self._link.call(REGISTRY, self._keys, [act.encode(), *arguments], timeout_s)


def _milliseconds(terms: LeaseTerms) -> tuple[bytes, bytes]:
    return b"%d" % round(terms.lease_s * 1e3), b"%d" % round(terms.keep_s * 1e3)


def _holder_id(data: bytes) -> int:
    (number,) = struct.unpack(">I", data)
    return int(number)


def _pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
