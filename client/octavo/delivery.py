"""What of a get has arrived, and whether it may be used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.status import Status, known_statuses
from octavo.transfer import Transfer


class DeliveryLedger:
    """One mark for each wanted unit. A page is ``DONE`` when all of its units are good.

    A row is *copied* when its bytes are in the sink, *good* when the lease that covered the
    copy is known to have held, or its digest was right.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._ranks = transfer.unit_ranks()
        self._good = np.zeros(transfer.row_count, dtype=np.bool_)
        self._expired = np.zeros(transfer.row_count, dtype=np.bool_)
        self._corrupt = np.zeros(transfer.row_count, dtype=np.bool_)
        self._outcome: NDArray[np.uint8] | None = None
        self.bytes_copied = 0
        self.unwanted_count = 0
        self.arrived_count = 0

    def rows_of(
        self, positions: NDArray[np.int64], units: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Row numbers, and which of them were asked for. Others must not be copied."""
        transfer = self._transfer
        ranks = self._ranks[units].astype(np.int64)
        places, moved = transfer.places_of(positions)
        wanted = moved & (ranks < len(transfer.units))
        self.unwanted_count += int(len(wanted) - np.count_nonzero(wanted))
        return places * len(transfer.units) + ranks, wanted

    def copied(self, row_count: int, size_bytes: int) -> None:
        """``row_count`` rows are in the sink."""
        self.arrived_count += row_count
        self.bytes_copied += size_bytes

    def good(self, rows: NDArray[np.int64]) -> None:
        """The bytes of ``rows`` may be used."""
        self._good[rows] = True

    def expired(self, rows: NDArray[np.int64]) -> None:
        """The lease of ``rows`` had run out when the copy ended."""
        self._expired[rows] = True

    def corrupt(self, rows: NDArray[np.int64]) -> None:
        """The bytes of ``rows`` failed their check."""
        self._corrupt[rows] = True

    def close(self, statuses: NDArray[np.uint8]) -> None:
        """The node's own account, one status a page; missing ones count as ``MISSING``."""
        outcome = np.full(self._transfer.page_count, Status.MISSING, dtype=np.uint8)
        known = known_statuses(statuses[: self._transfer.page_count])
        outcome[: len(known)] = known
        self._outcome = outcome

    def statuses(self) -> NDArray[np.uint8]:
        """One status a page. Only ``DONE`` pages may be used."""
        transfer = self._transfer
        shape = (transfer.page_count, len(transfer.units))
        if self._outcome is None:
            result = np.full(transfer.page_count, Status.UNAVAILABLE, dtype=np.uint8)
        else:
            result = self._outcome.copy()
            # Granted or sent, says the node; but not all of it reached the sink.
            claimed = (result == Status.GRANTED) | (result == Status.DONE)
            result[claimed] = Status.UNAVAILABLE
        result[self._expired.reshape(shape).any(axis=1)] = Status.EXPIRED
        result[self._corrupt.reshape(shape).any(axis=1)] = Status.CORRUPT
        result[self._good.reshape(shape).all(axis=1)] = Status.DONE
        return result
