"""Random operations on a cache beside a plain dict. What is got must be what was put."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from tests.cache.cache_model import DEPTH, CacheModel, mortal, numbers_of, wishes
from tests.cache.invariants import check_invariants
from tests.cache.world import KIB, World, body

from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.retaining import Retention
from octavo_server.cache.statuses import (
    ALREADY_PRESENT,
    DONE,
    MISSING,
    REJECTED,
    RESERVED,
)

roots = st.integers(0, 3)
branches = st.integers(0, 2)
depths = st.integers(1, DEPTH)
writers = st.integers(0, 1)
readers = st.integers(0, 2)
picks = st.integers(0, 10_000)


class CacheMachine(CacheModel):
    """Puts, gets, holds, deletes, waits, flips bits and restarts, in any order."""

    @initialize()
    def start(self) -> None:
        self.world = World(
            Path(self.directory.name),
            memory_bytes=384 * KIB,
            slab_bytes=32 * KIB,
            nvme_bytes=640 * KIB,
            limits=CacheLimits(pin_share_max=0.2),
        )
        self.run(self.world.open())
        self.forget_sessions()

    @rule(writer=writers, root=roots, branch=branches)
    def put_whole(self, writer: int, root: int, branch: int) -> None:
        self.put(writer, root, branch, DEPTH, Retention())  # often, for the sake of pressure

    @rule(writer=writers, root=roots, branch=branches, depth=depths, wish=wishes)
    def put(self, writer: int, root: int, branch: int, depth: int, wish: Retention) -> None:
        session = self.sessions[writer]
        numbers = numbers_of(root, branch, depth)
        self.known.append((root, numbers))
        chain = self.chain(session, root, numbers)
        wish = mortal(root, wish)

        def reserve() -> tuple[Reservation | None, NDArray[np.uint8], int]:
            lengths = self.lengths(numbers, writer + 1)
            answer = self.world.reserve(
                session, chain, length=lengths, variant=writer + 1, wish=wish
            )
            return *answer, self.lost_pages()  # at once: writes under way go on taking pages away

        reservation, statuses, lost = self.now(reserve)
        self.wished(numbers, wish)
        fine = [set(row) <= {RESERVED, ALREADY_PRESENT} for row in statuses.tolist()]
        whole = [*fine, False].index(False)
        if reservation is not None:
            self.run(self.commit(writer, reservation, numbers))
            self.now(self.world.cache.reservations.end, reservation)
        # Unless loads or writes under way took a page of it away while the bytes were copied.
        if self.lost_pages() == lost:
            assert self.world.present(session, chain) >= whole, "what was put is not found"

    @rule(
        writer=writers,
        root=roots,
        branch=branches,
        depth=depths,
        unit=st.integers(0, 1),
        turn=st.sampled_from([None, 0, 1]),
        wish=wishes,
    )
    def reserve(
        self,
        writer: int,
        root: int,
        branch: int,
        depth: int,
        unit: int,
        turn: int | None,
        wish: Retention,
    ) -> None:
        session = self.sessions[writer]
        numbers = numbers_of(root, branch, depth)
        self.known.append((root, numbers))
        chain = self.chain(session, root, numbers)
        wish = mortal(root, wish)
        positions = range(depth) if turn is None else range(min(turn, depth - 1), depth, 2)
        reservation, _ = self.now(
            self.world.reserve,
            session,
            chain,
            length=self.lengths([numbers[position] for position in positions], writer + 1),
            positions=positions,
            variant=writer + 1,
            units=[unit] if root > 1 else None,
            wish=wish,
        )
        self.wished([numbers[position] for position in positions], wish)
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

    @rule(reader=readers, pick=picks)
    def match(self, reader: int, pick: int) -> None:
        session = self.sessions[reader]
        root, numbers = self.known[pick % len(self.known)]
        match = self.world.cache.match(session, self.chain(session, root, numbers))
        units = set(range(1 if root < 2 else 2))
        for number in numbers[: match.page_count]:
            assert self.stored.get(number, set()) >= units
        self.check_not_expired(numbers[: match.page_count])

    @rule(reader=readers, pick=picks, wish=wishes, unpin=st.booleans())
    def retain(self, reader: int, pick: int, wish: Retention, unpin: bool) -> None:
        session = self.sessions[reader]
        root, numbers = self.known[pick % len(self.known)]
        chain = self.chain(session, root, numbers)
        retain = self.world.cache.retain
        statuses = self.now(lambda: retain(session, chain, wish, unpin=unpin)).tolist()
        found = [
            number for number, status in zip(numbers, statuses, strict=True) if status != MISSING
        ]
        self.check_not_expired(found)
        if wish.ttl_s:
            self.wished(found, wish)

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
        # In one step, as a node does it: what matched may be gone after the next.
        made = self.now(lambda: cache.hold(session, chain, cache.match(session, chain), 10.0))
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
        world = self.world

        async def flushed_and_counted() -> tuple[int, int]:
            answer = await world.cache.flush(self.sessions[0].namespaces)
            # Without an await in between: a hold's loads may still be arriving.
            table = world.cache.table
            rows = table.live_rows()
            whole = (table.memory_mask[rows] == table.full_mask[rows]) & ~table.withdrawn[rows]
            return answer.durable_pages + answer.volatile_pages, int(whole.sum())

        answered, counted = self.run(flushed_and_counted())
        assert answered == counted

    @rule()
    def evict(self) -> None:
        self.now(self.world.evict_all)

    @rule(seconds=st.sampled_from([1.0, 11.0, 31.0]), looked=st.booleans())
    def time_passes(self, seconds: float, looked: bool) -> None:
        if looked:
            self.now(self.world.advance, seconds)
        else:  # nobody has ended yet what has run out
            self.world.clock.now_s += seconds

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
