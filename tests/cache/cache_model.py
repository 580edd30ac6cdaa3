"""What the random machine of ``test_cache_machine.py`` knows, and how it reads and fills."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
)
from tests.cache.world import World, body, chain_of

from octavo_server.cache.chains import ChainView
from octavo_server.cache.getting import GetPages, Grant
from octavo_server.cache.leases import Hold, Lease
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.retaining import Retention
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import (
    CORRUPT,
    EXPIRED,
    GRANTED,
    MISSING,
    STORED,
    UNAVAILABLE,
)

T = TypeVar("T")

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where syncing costs nothing: durability is not what this is about."""

LENGTHS = (4096, 5000, 12_000, 30_000)
DEPTH = 12
SHARED = 5
"""Pages that the branches of a root have in common."""

roots = st.integers(0, 3)
branches = st.integers(0, 2)
depths = st.integers(1, DEPTH)
writers = st.integers(0, 1)
readers = st.integers(0, 2)
picks = st.integers(0, 10_000)
wishes = st.sampled_from(
    [Retention()] * 4
    + [Retention(ttl_s=5.0), Retention(ttl_s=40.0), Retention(pin_s=20.0)]
    + [Retention(pin_s=5000.0), Retention(ttl_s=15.0, pin_s=60.0)]
)


def numbers_of(root: int, branch: int, depth: int) -> list[int]:
    """The pages of a chain: branches of a root share their first pages."""
    return [
        root * 100 + (position if position < SHARED else branch * 20 + position)
        for position in range(depth)
    ]


def mortal(root: int, wish: Retention) -> Retention:
    """Pages of root 3 are never put to stay for ever, or hardly any page would ever expire."""
    return replace(wish, ttl_s=wish.ttl_s or 15.0) if root == 3 else wish


class CacheModel(RuleBasedStateMachine):
    """Roots 0 and 1 have pages of one unit, 2 and 3 of two. Sessions 0 and 1 write variants 1
    and 2 and read their own; session 2 reads both. The model: how often each page was deleted
    (which is part of its bytes), which of its units were stored since, and the moment from which
    it must not be found (at the latest: a page that was evicted is forgotten with its wishes).
    """

    world: World

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory(prefix="octavo-test-", dir=FAST)
        self.epochs: dict[int, int] = {}
        self.stored: dict[int, set[int]] = {}
        self.until_s: dict[int, float] = {}
        self.spoiled = 0
        self.known: list[tuple[int, list[int]]] = [(0, [0])]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, 30))

    def now(self, call: Callable[..., T], *args: Any, **settings: Any) -> T:
        """A plain call, made on the loop as the node makes it."""

        async def work() -> T:
            return call(*args, **settings)

        return self.run(work())

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.run(self.world.close())
        self._runner.close()
        self.directory.cleanup()

    def forget_sessions(self) -> None:
        self.sessions: list[Session] = [
            self.run(self.world.session(variants=[1])),
            self.run(self.world.session(variants=[2])),
            self.run(self.world.session()),
        ]
        self.leases: list[tuple[Session, Lease, dict[int, int]]] = []
        self.holds: list[tuple[Session, Hold, list[int]]] = []
        self.reservations: list[tuple[int, Reservation, list[int]]] = []

    def chain(self, session: Session, root: int, numbers: list[int]) -> ChainView:
        return chain_of(session, numbers, layout=root // 2)

    def length(self, number: int, variant: int) -> int:
        return LENGTHS[(number + variant) % len(LENGTHS)]

    def lengths(self, numbers: list[int], variant: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.array([[self.length(number, variant)] for number in numbers], dtype=np.uint32)

    def bytes_of(self, number: int, unit: int, variant: int) -> bytes:
        version = self.epochs.get(number, 0) * 10 + variant
        return body(number, unit, self.length(number, variant), version)

    def removed(self, number: int) -> None:
        self.epochs[number] = self.epochs.get(number, 0) + 1
        self.stored.pop(number, None)
        self.until_s.pop(number, None)

    def wished(self, numbers: list[int], wish: Retention) -> None:
        """Pages were put, or wanted, for so long."""
        now_s = self.world.clock()
        until_s = now_s + wish.ttl_s if wish.ttl_s else math.inf
        for number in numbers:
            before_s = self.until_s.get(number, 0.0)
            self.until_s[number] = until_s if before_s <= now_s else max(before_s, until_s)

    def check_not_expired(self, numbers: Iterable[int]) -> None:
        """These were found just now."""
        for number in numbers:
            assert self.world.clock() < self.until_s[number], f"page {number} has expired"

    @property
    def crowded(self) -> bool:
        """Whether others may keep so much of the arena that loads find no room for long."""
        leases = self.world.cache.leases
        return bool(
            leases.lease_count
            or leases.hold_count
            or len(self.world.cache.reservations)
            or self.world.cache.keeping.page_count
        )

    def lost_pages(self) -> int:
        counters = self.world.cache.counters
        names = ("nvme_evicted_pages", "memory_evicted_pages", "quarantined_pages")
        return sum(counters[name] for name in names)

    def check_readable(self, numbers: dict[int, int], units: range) -> None:
        """``numbers``: row → page number."""
        for row, number in numbers.items():
            variant = int(self.world.cache.table.variant[row])
            for unit in units:
                assert unit in self.stored.get(number, ()), f"page {number} was never stored"
                expected = self.bytes_of(number, unit, variant)
                assert self.world.read(row, unit) == expected, f"wrong bytes of page {number}"

    async def commit(self, writer: int, reservation: Reservation, numbers: list[int]) -> None:
        variant = writer + 1
        bodies = [
            (position, unit, self.bytes_of(number, unit, variant))
            for position, number in enumerate(numbers)
            for unit in range(reservation.layout.layout.unit_count)
            if int(reservation.open_mask[position]) >> unit & 1
        ]
        statuses = await self.world.commit(reservation, bodies)
        for (position, unit, _), status in zip(bodies, statuses, strict=True):
            assert status in (STORED, EXPIRED)
            if status == STORED:
                self.stored.setdefault(numbers[position], set()).add(unit)

    async def read(
        self, session: Session, root: int, numbers: list[int], hold: Hold | None, keep: bool
    ) -> None:
        world = self.world
        chain = hold.chain if hold is not None else self.chain(session, root, numbers)
        units = range(chain.layout.layout.unit_count)
        crowded = self.crowded or keep  # what this get keeps, too
        present = int((hold.rows >= 0).sum()) if hold is not None else world.present(session, chain)
        request = GetPages(
            chain=chain,
            hold=hold,
            first_position=0,
            units=np.array(units, dtype=np.int32),
            wait_pending=False,
            until_s=world.clock() + (0.5 if crowded else 20.0),
            lease_s=10.0,
        )
        statuses: list[int] = []
        allowed = {GRANTED, MISSING}
        if crowded:
            allowed.add(UNAVAILABLE)
        if self.spoiled:
            allowed.add(CORRUPT)
        async for item in world.cache.get(session, request):
            if not isinstance(item, Grant):
                statuses = item.statuses.tolist()
                continue
            rows = zip(item.rows.tolist(), item.positions.tolist(), strict=True)
            numbered: dict[int, int] = {row: numbers[position] for row, position in rows}
            self.check_not_expired(numbered.values())
            self.check_readable(numbered, units)
            if keep:
                self.leases.append((session, item.lease, numbered))
            else:
                assert world.cache.leases.release(session, item.lease.lease_id)
        for position, status in enumerate(statuses):
            if position < present and not self.spoiled and hold is None:
                assert status != MISSING, f"page {numbers[position]} matched and is missing"
            assert status in allowed, f"page {numbers[position]} is {status}"
