"""Reserved units whose bytes a thread receives from a worker, straight into their places.

Nobody can see a place before its unit is published, and it is given to nobody else while bytes
may still arrive there: a worker that is late, or lies about its bytes, hurts its own put alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from octavo_proto.bulk import UnitsSent
from octavo_server.cache.filling import published, seed_of
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.statuses import EXPIRED, REJECTED, STORED

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache


class ArrivingUnits:
    """Units of one reservation on their way in. End it with ``publish`` or ``abandon``, when no
    thread writes to ``targets`` any more.

    ``statuses`` has a row for each unit that was sent. ``begun`` are the rows that are awaited,
    ``targets`` and ``seeds`` their places and the seeds of their digests; other rows' bytes
    belong nowhere.
    """

    def __init__(
        self,
        cache: PageCache,
        reservation: Reservation,
        sent: UnitsSent,
        hang_up: Callable[[], None],
    ) -> None:
        """``hang_up`` ends the transfer; it is called when the reservation ends before it."""
        self._cache: Final = cache
        self._reservation: Final = reservation
        self._sent: Final = sent
        self._hang_up: Final = hang_up
        table, arena = cache.table, cache.memory.arena
        self.statuses = np.full(len(sent.positions), REJECTED, dtype=np.uint8)
        inside = sent.positions < len(reservation.rows)
        inside &= sent.units < reservation.layout.layout.unit_count
        candidates = np.flatnonzero(inside)
        rows = reservation.rows[sent.positions[candidates]]
        unit_rows = np.where(rows >= 0, table.unit_base[rows] + sent.units[candidates], 0)
        fits = (rows >= 0) & (table.units.length[unit_rows] == sent.lengths[candidates])
        candidates, rows, unit_rows = candidates[fits], rows[fits], unit_rows[fits]
        bits = np.uint64(1) << sent.units[candidates].astype(np.uint64)
        may = cache.reservations.begin_copy(reservation, sent.positions[candidates], bits)
        self.begun: Final = candidates[may]
        columns = zip(
            rows[may].tolist(),
            sent.units[self.begun].tolist(),
            sent.lengths[self.begun].tolist(),
            table.units.memory_offset[unit_rows[may]].tolist(),
            strict=True,
        )
        self.seeds: list[int] = []
        self.targets: list[memoryview] = []
        for row, unit, length, place in columns:
            self.seeds.append(seed_of(cache, reservation, row, unit, length))
            self.targets.append(arena.view(place, length))
        reservation.abandon_fills.add(hang_up)

    def publish(self, whole: NDArray[np.bool_]) -> None:
        """Makes those begun units visible whose bytes are ``whole``; gives the others up."""
        sent, good = self._sent, self.begun[whole]
        self._end()
        bad = self.begun[~whole]
        self._cache.reservations.abandon_copy(
            self._reservation, sent.positions[bad], sent.units[bad]
        )
        complete, stored = self._cache.reservations.end_copy(
            self._reservation, sent.positions[good], sent.units[good], sent.digests[good]
        )
        size_bytes = int(sent.lengths[good][stored].sum())
        published(self._cache, complete, int(stored.sum()), size_bytes)
        self.statuses[good] = np.where(stored, STORED, EXPIRED)

    def abandon(self) -> None:
        """Gives all of them up, and their places with them."""
        self._end()
        self._cache.reservations.abandon_copy(
            self._reservation, self._sent.positions[self.begun], self._sent.units[self.begun]
        )

    def _end(self) -> None:
        self._reservation.abandon_fills.discard(self._hang_up)
        for target in self.targets:
            target.release()
