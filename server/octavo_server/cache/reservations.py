"""Reservations: the right to fill units, from reserving to visible.

A reserved unit has a place in the arena that nobody can see. It becomes visible when its bytes
have been copied there and its digest is known; until then a crash, a stall or a wrong byte of
the worker's hurts only its own put. A reservation that runs out gives back what was not
filled, except for what is being copied at that moment, which follows when the copy ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.arrivals import Arrivals
from octavo_server.cache.counters import Counters
from octavo_server.cache.deadlines import Deadline, Deadlines
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.memory_tier import MemoryTier
from octavo_server.cache.page_table import PageTable, Rows
from octavo_server.cache.pins import Pins
from octavo_server.cache.session import Session, SessionLayout
from octavo_server.cache.statuses import MISSING
from octavo_server.errors import LimitReached
from octavo_server.store.slabs import sizes_of_slots


@dataclass(slots=True, eq=False)
class Reservation:
    """Units of one chain that a session may fill.

    ``rows`` and the masks have one element a page of the reserved chain; a row is NO_ROW and
    its masks 0 where nothing of the page was reserved.
    """

    reservation_id: int
    session: Session
    layout: SessionLayout
    rows: Rows
    open_mask: NDArray[np.uint64]
    copying_mask: NDArray[np.uint64]
    deadline: Deadline
    reserved_bytes: int
    ended: bool = False
    """Nothing more can be filled."""
    revoked: bool = False
    """What is being copied is not wanted any more either."""
    abandon_fills: set[Callable[[], None]] = field(default_factory=set[Callable[[], None]])
    """Gives up a unit that a client sends piece by piece. Unlike a copy, it may never end."""


class Reservations:
    """Makes and ends reservations."""

    def __init__(
        self,
        table: PageTable,
        memory: MemoryTier,
        pins: Pins,
        arrivals: Arrivals,
        deadlines: Deadlines,
        limits: CacheLimits,
        counters: Counters,
    ) -> None:
        self._table: Final = table
        self._memory: Final = memory
        self._pins: Final = pins
        self._arrivals: Final = arrivals
        self._deadlines: Final = deadlines
        self._limits: Final = limits
        self._counters: Final = counters
        self._reservations: dict[int, Reservation] = {}
        self._next_id = 1
        self.reserved_bytes = 0

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def bytes_left(self) -> int:
        """What may be reserved before reservations take more of the arena than they may."""
        share = self._limits.reserved_share_max * self._memory.arena.capacity_bytes
        return max(0, int(share) - self.reserved_bytes)

    def check_room(self, session: Session) -> None:
        """Raises LimitReached when the session has as many reservations as it may have."""
        if len(session.reservations) >= self._limits.reservations_max:
            raise LimitReached(
                f"the session has {len(session.reservations)} reservations, the limit"
            )

    def make(
        self,
        session: Session,
        layout: SessionLayout,
        rows: Rows,
        masks: NDArray[np.uint64],
        reserved_bytes: int,
        duration_s: float,
    ) -> Reservation:
        """Reserves units whose places are set already (``memory_offset``)."""
        reserved = masks != 0
        np.bitwise_or.at(self._table.reserved_mask, rows[reserved], masks[reserved])
        self._next_id += 1
        reservation_id = self._next_id
        deadline = self._deadlines.after(duration_s, lambda: self._expire(reservation))
        reservation = Reservation(
            reservation_id=reservation_id,
            session=session,
            layout=layout,
            rows=rows,
            open_mask=masks.copy(),
            copying_mask=np.zeros_like(masks),
            deadline=deadline,
            reserved_bytes=reserved_bytes,
        )
        self._reservations[reservation_id] = reservation
        session.reservations.add(reservation_id)
        self.reserved_bytes += reserved_bytes
        self._counters.add("reservations_made")
        return reservation

    def find(self, session: Session, reservation_id: int) -> Reservation | None:
        """The session's reservation of that name, if it holds still."""
        reservation = self._reservations.get(reservation_id)
        return reservation if reservation and reservation.session is session else None

    def renew(self, session: Session, reservation_id: int, duration_s: float) -> bool:
        """Lets it last ``duration_s`` from now. False if it had ended."""
        reservation = self.find(session, reservation_id)
        if reservation is None:
            return False
        reservation.deadline.move(self._deadlines.now() + duration_s)
        return True

    def begin_copy(
        self, reservation: Reservation, positions: NDArray[np.int64], bits: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Marks units (one bit each, at their positions) as being filled.

        False for those that the reservation doesn't have, or that were handed over before.
        """
        may: NDArray[np.bool_] = (reservation.open_mask[positions] & bits) != 0
        if reservation.ended:
            may[:] = False
        # Of a unit that is named twice the first one counts.
        _, first = np.unique(
            np.stack([positions.astype(np.uint64), bits]), axis=1, return_index=True
        )
        twice = np.ones(len(positions), dtype=np.bool_)
        twice[first] = False
        may &= ~twice
        np.bitwise_and.at(reservation.open_mask, positions[may], ~bits[may])
        np.bitwise_or.at(reservation.copying_mask, positions[may], bits[may])
        return may

    def end_copy(
        self,
        reservation: Reservation,
        positions: NDArray[np.int64],
        units: NDArray[np.int64],
        digests: NDArray[np.uint64],
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """Publishes filled units, unless the reservation ended meanwhile.

        Returns the rows of pages that became complete by it, and for each unit whether it is
        stored.
        """
        table = self._table
        rows = reservation.rows[positions]
        bits = np.uint64(1) << units.astype(np.uint64)
        np.bitwise_and.at(reservation.copying_mask, positions, ~bits)
        np.bitwise_and.at(table.reserved_mask, rows, ~bits)
        unit_rows = (table.unit_base[rows] + units).astype(np.int32)
        self._no_longer_reserved(reservation, unit_rows)
        stored = np.full(len(rows), not reservation.revoked) & ~table.withdrawn[rows]
        self._memory.give_back(unit_rows[~stored])
        table.units.digest[unit_rows[stored]] = digests[stored]
        pages, place = np.unique(rows[stored], return_inverse=True)
        before = table.memory_mask[pages]
        after = before.copy()
        np.bitwise_or.at(after, place, bits[stored])
        table.set_memory_mask(pages, after)
        complete = pages[after == table.full_mask[pages]]
        # Also pages that are not complete, or not stored: there may be nothing left to wait for.
        self._arrivals.changed(np.unique(rows))
        self._pins.settle(rows[~stored])
        return complete, stored

    def abandon_copy(
        self, reservation: Reservation, positions: NDArray[np.int64], units: NDArray[np.int64]
    ) -> None:
        """Gives up units that were being filled."""
        rows = reservation.rows[positions]
        bits = np.uint64(1) << units.astype(np.uint64)
        np.bitwise_and.at(reservation.copying_mask, positions, ~bits)
        np.bitwise_and.at(self._table.reserved_mask, rows, ~bits)
        unit_rows = (self._table.unit_base[rows] + units).astype(np.int32)
        self._no_longer_reserved(reservation, unit_rows)
        self._memory.give_back(unit_rows)
        self._arrivals.failed(rows, MISSING)
        self._pins.settle(rows)

    def end(self, reservation: Reservation) -> None:
        """Ends it because its time or its session ended, or its owner gave it up: what is being
        copied at this moment won't be stored."""
        reservation.revoked = True
        self.finish(reservation)
        self._abandon_fills(reservation)

    def finish(self, reservation: Reservation) -> None:
        """Ends it because nothing more will come: gives back what was not filled. What is being
        copied at this moment is stored."""
        if reservation.ended:
            return
        table = self._table
        reservation.ended = True
        if not reservation.abandon_fills:  # else it still bounds the time that these may take
            reservation.deadline.cancel()
        del self._reservations[reservation.reservation_id]
        reservation.session.reservations.discard(reservation.reservation_id)
        self.reserved_bytes -= reservation.reserved_bytes
        left = np.flatnonzero(reservation.open_mask)
        rows, masks = reservation.rows[left], reservation.open_mask[left]
        reservation.open_mask[left] = 0
        np.bitwise_and.at(table.reserved_mask, rows, ~masks)
        owners, unit_rows = table.expanded(rows)
        bits = np.uint64(1) << (unit_rows - table.unit_base[rows][owners]).astype(np.uint64)
        self._memory.give_back(unit_rows[(masks[owners] & bits) != 0])
        self._arrivals.failed(rows, MISSING)
        self._pins.settle(rows)

    def end_session(self, session: Session) -> None:
        """Ends all of a session's reservations."""
        for reservation_id in tuple(session.reservations):
            self.end(self._reservations[reservation_id])

    def _no_longer_reserved(self, reservation: Reservation, unit_rows: NDArray[np.int32]) -> None:
        """Filled units count as pages from now on, no longer as reserved bytes."""
        if not reservation.ended:  # else all of it was taken off together
            filled = int(sizes_of_slots(self._table.units.length[unit_rows]).sum())
            reservation.reserved_bytes -= filled
            self.reserved_bytes -= filled

    def _expire(self, reservation: Reservation) -> None:
        if not reservation.ended:
            self._counters.add("reservations_expired")
        self.end(reservation)

    def _abandon_fills(self, reservation: Reservation) -> None:
        for abandon in tuple(reservation.abandon_fills):
            abandon()
