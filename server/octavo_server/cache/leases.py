"""Leases (the right to read) and holds (a lease on what a match found, asked for by name)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.chains import ChainView
from octavo_server.cache.counters import Counters
from octavo_server.cache.deadlines import Deadline, Deadlines
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.page_table import Rows
from octavo_server.cache.pins import Pins
from octavo_server.cache.session import Session
from octavo_server.errors import LimitReached, SessionUnknown


@dataclass(frozen=True, slots=True, eq=False)
class LeasedUnits:
    """Units of a lease in the order of its grant, one row a unit: what streams may ask for."""

    pages: Rows
    places: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Lease:
    """Pages that stay readable in memory until it is released or runs out."""

    lease_id: int
    session: Session
    rows: Rows
    deadline: Deadline
    on_expiry: Callable[[], None] | None = None
    """Called when it runs out, not when it is released."""
    bulk_units: LeasedUnits | None = None
    """None where the grant told the places themselves, or the bytes go with it."""


@dataclass(slots=True, eq=False)
class Hold:
    """A matched chain that stays on the node, in whatever tier, until it is used or runs out."""

    hold_id: int
    session: Session
    chain: ChainView
    rows: Rows
    """By position; NO_ROW where nothing is held."""
    pinned: Rows
    deadline: Deadline
    held_bytes: int


class Leases:
    """Grants leases and holds, and ends them: by release, by time, or with their session."""

    def __init__(
        self, pins: Pins, deadlines: Deadlines, limits: CacheLimits, counters: Counters
    ) -> None:
        self._pins: Final = pins
        self._deadlines: Final = deadlines
        self._limits: Final = limits
        self._counters: Final = counters
        self._next_id = 1
        self._leases: dict[int, Lease] = {}
        self._holds: dict[int, Hold] = {}

    @property
    def lease_count(self) -> int:
        """Leases that hold now."""
        return len(self._leases)

    @property
    def hold_count(self) -> int:
        """Holds that hold now."""
        return len(self._holds)

    def lease(self, session: Session, rows: Rows, duration_s: float) -> Lease:
        """A lease over pages that the caller has pinned; the pins are the lease's from now on.

        Raises:
            LimitReached: the session has as many as it may have. The pins stay the caller's.
            SessionUnknown: it was closed while the caller waited for pages. The same.
        """
        if session.closed:
            raise SessionUnknown("unknown session: it was closed during the call")
        if len(session.leases) >= self._limits.leases_max:
            raise LimitReached(f"the session has {len(session.leases)} leases, the limit")
        lease_id = self._take_id()
        deadline = self._deadlines.after(duration_s, lambda: self._expire_lease(lease_id))
        lease = Lease(lease_id, session, rows, deadline)
        self._leases[lease_id] = lease
        session.leases.add(lease_id)
        self._counters.add("leases_granted")
        return lease

    def find(self, session: Session, lease_id: int) -> Lease | None:
        """The session's lease of that name, if it holds still."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.session is session else None

    def release(self, session: Session, lease_id: int) -> bool:
        """Ends a lease. False if it had run out before, or never was this session's."""
        lease = self.find(session, lease_id)
        if lease is None:
            return False
        self._end_lease(lease)
        return True

    def renew(self, session: Session, lease_id: int, duration_s: float) -> bool:
        """Lets a lease last ``duration_s`` from now. False if it had run out."""
        lease = self.find(session, lease_id)
        if lease is None:
            return False
        lease.deadline.move(self._deadlines.now() + duration_s)
        return True

    def hold(
        self,
        session: Session,
        chain: ChainView,
        rows: Rows,
        pinned: Rows,
        held_bytes: int,
        duration_s: float,
    ) -> Hold:
        """A hold over pages that it pins itself.

        Raises:
            LimitReached: the session has as many as it may have.
        """
        if len(session.holds) >= self._limits.holds_max:
            raise LimitReached(f"the session has {len(session.holds)} holds, the limit")
        hold_id = self._take_id()
        deadline = self._deadlines.after(duration_s, lambda: self._expire_hold(hold_id))
        hold = Hold(hold_id, session, chain, rows, pinned, deadline, held_bytes)
        self._pins.pin(pinned)
        self._holds[hold_id] = hold
        session.holds.add(hold_id)
        self._counters.add("holds_granted")
        return hold

    def find_hold(self, session: Session, hold_id: int) -> Hold | None:
        """The session's hold of that name, if it holds still."""
        hold = self._holds.get(hold_id)
        return hold if hold is not None and hold.session is session else None

    def held_bytes(self, session: Session) -> int:
        """Bytes of all pages in the session's holds."""
        return sum(self._holds[hold_id].held_bytes for hold_id in session.holds)

    def release_hold(self, session: Session, hold_id: int) -> bool:
        """Ends a hold. False if it had ended before."""
        hold = self.find_hold(session, hold_id)
        if hold is None:
            return False
        self._end_hold(hold)
        return True

    def renew_hold(self, session: Session, hold_id: int, duration_s: float) -> bool:
        """Lets a hold last ``duration_s`` from now. False if it had ended."""
        hold = self.find_hold(session, hold_id)
        if hold is None:
            return False
        hold.deadline.move(self._deadlines.now() + duration_s)
        return True

    def end_session(self, session: Session) -> None:
        """Ends everything that the session holds."""
        for lease_id in tuple(session.leases):
            self._end_lease(self._leases[lease_id])
        for hold_id in tuple(session.holds):
            self._end_hold(self._holds[hold_id])

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _end_lease(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        lease.session.leases.discard(lease.lease_id)
        lease.deadline.cancel()
        self._pins.unpin(lease.rows)

    def _end_hold(self, hold: Hold) -> None:
        del self._holds[hold.hold_id]
        hold.session.holds.discard(hold.hold_id)
        hold.deadline.cancel()
        self._pins.unpin(hold.pinned)

    def _expire_lease(self, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._counters.add("leases_expired")
            self._end_lease(lease)
            if lease.on_expiry is not None:
                lease.on_expiry()

    def _expire_hold(self, hold_id: int) -> None:
        hold = self._holds.get(hold_id)
        if hold is not None:
            self._counters.add("holds_expired")
            self._end_hold(hold)
