"""Random operations on a cache beside a plain dict. What is got must be what was put."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.cache.invariants import check_invariants
from tests.cache.world import KIB, World, body, chain_of

from octavo_server.cache.chains import ChainView
from octavo_server.cache.getting import GetPages, Grant
from octavo_server.cache.leases import Hold, Lease
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import (
    ALREADY_PRESENT,
    CORRUPT,
    DONE,
    EXPIRED,
    GRANTED,
    MISSING,
    REJECTED,
    RESERVED,
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


def numbers_of(root: int, branch: int, depth: int) -> list[int]:
    """The pages of a chain: branches of a root share their first pages."""
    return [
        root * 100 + (position if position < SHARED else branch * 20 + position)
        for position in range(depth)
    ]


class CacheMachine(RuleBasedStateMachine):
    """Roots 0 and 1 have pages of one unit, 2 and 3 of two. Sessions 0 and 1 write variants 1
    and 2 and read their own; session 2 reads both. The model: how often each page was deleted
    (which is part of its bytes), and which of its units were stored since.
    """

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._directory = tempfile.TemporaryDirectory(prefix="octavo-test-", dir=FAST)
        self.epochs: dict[int, int] = {}
        self.stored: dict[int, set[int]] = {}
        self.spoiled = 0
        self.known: list[tuple[int, list[int]]] = [(0, [0])]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, 30))

    def now(self, call: Callable[..., T], *args: Any, **settings: Any) -> T:
        """A plain call, made on the loop as the node makes it."""

        async def work() -> T:
            return call(*args, **settings)

        return self.run(work())

    @initialize()
    def start(self) -> None:
        self.world = World(
            Path(self._directory.name),
            memory_bytes=384 * KIB,
            slab_bytes=32 * KIB,
            nvme_bytes=640 * KIB,
        )
        self.run(self.world.open())
        self.forget_sessions()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.run(self.world.close())
        self._runner.close()
        self._directory.cleanup()

    def forget_sessions(self) -> None:
        self.sessions: list[Session] = [
            self.run(self.world.session(variants=[1])),
            self.run(self.world.session(variants=[2])),
            self.run(self.world.session()),
        ]
        self.leases: list[tuple[Session, Lease, dict[int, int]]] = []
        self.holds: list[tuple[Session, Hold, list[int]]] = []
        self.reservations: list[tuple[int, Reservation, list[int]]] = []

    # The model

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

    @property
    def crowded(self) -> bool:
        """Whether others may keep so much of the arena that loads find no room for long."""
        leases = self.world.cache.leases
        return bool(leases.lease_count or leases.hold_count or len(self.world.cache.reservations))

    def check_readable(self, numbers: dict[int, int], units: range) -> None:
        """``numbers``: row → page number."""
        for row, number in numbers.items():
            variant = int(self.world.cache.table.variant[row])
            for unit in units:
                assert unit in self.stored.get(number, ()), f"page {number} was never stored"
                expected = self.bytes_of(number, unit, variant)
                assert self.world.read(row, unit) == expected, f"wrong bytes of page {number}"

    def lost_pages(self) -> int:
        counters = self.world.cache.counters
        names = ("nvme_evicted_pages", "memory_evicted_pages", "quarantined_pages")
        return sum(counters[name] for name in names)

    # Writing

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

    @rule(writer=writers, root=roots, branch=branches)
    def put_whole(self, writer: int, root: int, branch: int) -> None:
        self.put(writer, root, branch, DEPTH)  # often, for the sake of pressure

    @rule(writer=writers, root=roots, branch=branches, depth=depths)
    def put(self, writer: int, root: int, branch: int, depth: int) -> None:
        session = self.sessions[writer]
        numbers = numbers_of(root, branch, depth)
        self.known.append((root, numbers))
        chain = self.chain(session, root, numbers)
        reservation, statuses = self.now(
            self.world.reserve,
            session,
            chain,
            length=self.lengths(numbers, writer + 1),
            variant=writer + 1,
        )
        lost = self.lost_pages()
        fine = [set(row) <= {RESERVED, ALREADY_PRESENT} for row in statuses.tolist()]
        whole = [*fine, False].index(False)
        if reservation is not None:
            self.run(self.commit(writer, reservation, numbers))
            self.now(self.world.cache.reservations.end, reservation)
        # Unless loads or writes under way took a page of it away while the bytes were copied.
        if self.lost_pages() == lost:
            assert self.world.present(session, chain) >= whole, "what was put is not found"

    @rule(writer=writers, root=roots, branch=branches, depth=depths, unit=st.integers(0, 1))
    def reserve(self, writer: int, root: int, branch: int, depth: int, unit: int) -> None:
        session = self.sessions[writer]
        numbers = numbers_of(root, branch, depth)
        self.known.append((root, numbers))
        chain = self.chain(session, root, numbers)
        reservation, _ = self.now(
            self.world.reserve,
            session,
            chain,
            length=self.lengths(numbers, writer + 1),
            variant=writer + 1,
            units=[unit] if root > 1 else None,
        )
        if reservation is not None:
            self.reservations.append((writer, reservation, numbers))

    @rule(pick=picks, walk_away=st.booleans(), end=st.booleans())
    def fill(self, pick: int, walk_away: bool, end: bool) -> None:
        if not self.reservations:  # no precondition: what there is depends on timing
            return
        writer, reservation, numbers = self.reservations[pick % len(self.reservations)]
        if walk_away and not reservation.ended:
            # Cancelled at once: the copy is seen to its end, or was never begun.
            for number in numbers:
                units = range(reservation.layout.layout.unit_count)
                self.stored.setdefault(number, set()).update(units)

            async def cancelled() -> None:
                work = asyncio.ensure_future(self.commit(writer, reservation, numbers))
                await asyncio.sleep(0)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                while reservation.copying_mask.any():  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.001)

            self.run(cancelled())
        elif not reservation.ended:
            self.run(self.commit(writer, reservation, numbers))
            filled = self.world.fill([(0, 0, b"x" * self.length(numbers[0], writer + 1))])
            again = self.run(self.world.cache.commit(reservation, filled, self.world.ring))
            assert again.tolist() == [REJECTED]
        if end:
            self.now(self.world.cache.reservations.end, reservation)

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        if not self.reservations:  # no precondition: what there is depends on timing
            return
        _, reservation, _ = self.reservations.pop(pick % len(self.reservations))
        self.now(self.world.cache.reservations.end, reservation)

    # Reading

    @rule(reader=readers, pick=picks)
    def match(self, reader: int, pick: int) -> None:
        session = self.sessions[reader]
        root, numbers = self.known[pick % len(self.known)]
        match = self.world.cache.match(session, self.chain(session, root, numbers))
        units = set(range(1 if root < 2 else 2))
        for number in numbers[: match.page_count]:
            assert self.stored.get(number, set()) >= units

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
            self.check_readable(numbered, units)
            if keep:
                self.leases.append((session, item.lease, numbered))
            else:
                assert world.cache.leases.release(session, item.lease.lease_id)
        for position, status in enumerate(statuses):
            if position < present and not self.spoiled and hold is None:
                assert status != MISSING, f"page {numbers[position]} matched and is missing"
            assert status in allowed, f"page {numbers[position]} is {status}"

    @rule(reader=readers, pick=picks, keep=st.booleans())
    def get(self, reader: int, pick: int, keep: bool) -> None:
        keep = keep and len(self.leases) < 3  # or the arena is soon full of leases
        root, numbers = self.known[pick % len(self.known)]
        self.run(self.read(self.sessions[reader], root, numbers, None, keep))

    @rule(reader=readers, pick=picks)
    def get_from_nvme(self, reader: int, pick: int) -> None:
        self.run(self.world.settled(crowded=self.crowded))
        self.now(self.world.evict_all)
        self.get(reader, pick, False)

    @rule(reader=readers, pick=picks)
    def hold(self, reader: int, pick: int) -> None:
        session = self.sessions[reader]
        root, numbers = self.known[pick % len(self.known)]
        chain = self.chain(session, root, numbers)
        cache = self.world.cache
        made = self.now(cache.hold, session, chain, cache.match(session, chain), 10.0)
        if made is not None:
            self.holds.append((session, made, numbers))

    @rule(pick=picks, use=st.booleans())
    def use_hold(self, pick: int, use: bool) -> None:
        if not self.holds:  # no precondition: what there is depends on timing
            return
        session, hold, numbers = self.holds.pop(pick % len(self.holds))
        leases = self.world.cache.leases
        if leases.find_hold(session, hold.hold_id) is None:
            return
        if use:
            self.run(self.read(session, 0, numbers, hold, False))
        else:
            assert self.now(leases.release_hold, session, hold.hold_id)

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        if not self.leases:  # no precondition: what there is depends on timing
            return
        session, lease, numbered = self.leases.pop(pick % len(self.leases))
        leases = self.world.cache.leases
        before = (
            {row: bytes(self.world.read(row, 0)) for row in numbered}
            if (leases.renew(session, lease.lease_id, 10.0))
            else {}
        )
        for row, data in before.items():
            variant = int(self.world.cache.table.variant[row])
            epochs = range(self.epochs.get(numbered[row], 0) + 1)
            length = self.length(numbered[row], variant)
            assert data in [
                body(numbered[row], 0, length, epoch * 10 + variant) for epoch in epochs
            ], "a leased place was given to another page"
        assert self.now(leases.release, session, lease.lease_id) == bool(before)

    # Forgetting

    @rule(pick=picks, first=st.integers(0, DEPTH - 1), count=st.integers(1, DEPTH))
    def delete(self, pick: int, first: int, count: int) -> None:
        session = self.sessions[2]
        root, numbers = self.known[pick % len(self.known)]
        numbers = numbers[first : first + count]
        if not numbers:
            return
        chain = self.chain(session, root, numbers)
        statuses = self.run(self.world.cache.delete(session, chain))
        for number, status in zip(numbers, statuses.tolist(), strict=True):
            if status == DONE:
                self.removed(number)

    @rule(chance=st.integers(0, 3))
    def clear(self, chance: int) -> None:
        if chance:  # seldom, or there is never much to lose
            return
        self.run(self.world.cache.clear(self.sessions[0].namespaces[0], None))
        for number in {*self.stored, *self.epochs}:
            self.removed(number)

    @rule()
    def flush(self) -> None:
        answer = self.run(self.world.cache.flush(self.sessions[0].namespaces))
        table = self.world.cache.table
        rows = table.live_rows()
        whole = (table.memory_mask[rows] == table.full_mask[rows]) & ~table.withdrawn[rows]
        assert answer.durable_pages + answer.volatile_pages == int(whole.sum())

    @rule()
    def evict(self) -> None:
        self.now(self.world.evict_all)

    @rule(seconds=st.sampled_from([1.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now(self.world.advance, seconds)

    @rule(which=readers)
    def session_ends(self, which: int) -> None:
        world, old = self.world, self.sessions[which]
        self.now(world.cache.end_session, old)
        variants = None if which == 2 else [which + 1]
        self.sessions[which] = self.run(world.session(variants=variants))
        self.leases = [entry for entry in self.leases if entry[0] is not old]
        self.holds = [entry for entry in self.holds if entry[0] is not old]

    @rule(reader=readers, pick=picks, page=picks)
    def a_bit_flips(self, reader: int, pick: int, page: int) -> None:
        self.run(self.world.settled(crowded=self.crowded))
        table = self.world.cache.table
        root, numbers = self.known[pick % len(self.known)]
        chain = self.chain(self.sessions[2], root, numbers)
        rows = table.find(chain.keys, chain.namespace)
        rows = rows[(rows >= 0) & (table.nvme_mask[rows] != 0)]
        if not len(rows):
            return
        assert self.world.store is not None
        offset = int(table.units.nvme_offset[table.unit_base[rows[page % len(rows)]]])
        with (self.world.store.config.directory / "bodies.dat").open("r+b") as bodies:
            bodies.seek(offset)
            byte = bodies.read(1)[0]
            bodies.seek(offset)
            bodies.write(bytes([byte ^ 0x40]))
        self.spoiled += 1
        self.get_from_nvme(reader, pick)

    @rule(killed=st.booleans(), chance=st.integers(0, 2))
    def restart(self, killed: bool, chance: int) -> None:
        if chance:
            return
        self.run(self.world.reopen(killed=killed))
        self.forget_sessions()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            nvme = self.world.cache.nvme
            assert nvme is not None
            idle = not nvme._tasks  # pyright: ignore[reportPrivateUsage]
            check_invariants(self.world.cache, nvme_idle=idle)


COMMON = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)


def test_the_cache_agrees_with_a_dict() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(COMMON, max_examples=80, stateful_step_count=50, derandomize=True),
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_cache_agrees_with_a_dict_for_long() -> None:
    """Fresh seeds each time; a failure prints the blob that replays it."""
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(COMMON, max_examples=150, stateful_step_count=100, database=None),
    )
