"""The registry of holders in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Record:
    holder: Holder
    lapses_s: float
    ends_s: float


class LocalRegistry(HolderRegistry):
    """Locked, since heartbeats come from a thread of their own."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._records: dict[int, _Record] = {}
        self._names: dict[str, int] = {}
        self._retired: set[int] = set()

    async def register(self, holder: Holder, terms: LeaseTerms) -> int | None:
        with self._lock:
            current = self._names.get(holder.name)
            if current is not None:
                other = self._records[current]
                if other.holder.incarnation == holder.incarnation:
                    self._start_lease(current, holder, terms)
                    return current
                if other.lapses_s > self._now() and other.holder.started_ms > holder.started_ms:
                    return None
                self._retire(current)
            if len(self._records) >= HOLDERS_MAX:
                raise IndexUnavailable(Trouble.REFUSED, f"there are {HOLDERS_MAX} holders")
            holder_id = next(
                each
                for each in draw_holder_ids()
                if each not in self._records and each not in self._retired
            )
            self._start_lease(holder_id, holder, terms)
            self._names[holder.name] = holder_id
            return holder_id

    async def renew(self, holder_id: int, holder: Holder, terms: LeaseTerms) -> Renewal:
        with self._lock:
            if holder_id in self._records:
                self._start_lease(holder_id, self._records[holder_id].holder, terms)
                return Renewal.RENEWED
            current = self._names.get(holder.name)
            if current is None or self._records[current].holder.started_ms <= holder.started_ms:
                return Renewal.FORGOTTEN
            return Renewal.SUPERSEDED

    async def retire(self, holder_id: int) -> None:
        with self._lock:
            self._retire(holder_id)

    async def view(self) -> HolderView:
        with self._lock:
            return HolderView(
                {holder_id: record.holder for holder_id, record in self._records.items()},
                {holder_id: record.lapses_s for holder_id, record in self._records.items()},
                frozenset(self._retired),
                self._now(),
            )

    async def retire_lapsed(self) -> None:
        now = self._now()
        with self._lock:
            for holder_id in [key for key, each in self._records.items() if each.ends_s <= now]:
                self._retire(holder_id)

    async def bury(self, holder_ids: frozenset[int]) -> None:
        with self._lock:
            self._retired -= holder_ids

    def _start_lease(self, holder_id: int, holder: Holder, terms: LeaseTerms) -> None:
        lapses_s = self._now() + terms.lease_s
        self._records[holder_id] = _Record(holder, lapses_s, lapses_s + terms.keep_s)

    def _retire(self, holder_id: int) -> None:
        record = self._records.pop(holder_id, None)
        if record is not None:
            self._retired.add(holder_id)
            if self._names.get(record.holder.name) == holder_id:
                del self._names[record.holder.name]
