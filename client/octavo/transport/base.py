"""What every transport does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.deadline import Deadline
from octavo.errors import OctavoError
from octavo.health import HealthRecorder
from octavo.status import Status, known_statuses
from octavo.transfer import Rows, RowSink, RowSource, Transfer
from octavo.wire import Wire
from octavo_proto import columns
from octavo_proto.v1 import cache_pb2

WAIT_SHARE = 0.9
"""Share of a deadline that the node may wait for loads, so that its account still arrives."""

RENEW_SHARE = 0.5
"""Share of a lease or reservation after which it is renewed."""

ABORT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GetOrder:
    """A get, ready to be sent but for its delivery."""

    session_id: bytes
    chain: cache_pb2.Chain
    hold_id: int
    """0 for none."""
    transfer: Transfer
    fingerprint: bytes
    wait_pending: bool
    deadline: Deadline
    hint: cache_pb2.SessionHint | None = None

    def request(self, delivery: cache_pb2.Delivery.ValueType) -> cache_pb2.GetRequest:
        """The protocol's message for it."""
        return cache_pb2.GetRequest(
            session_id=self.session_id,
            chain=self.chain,
            hold_id=self.hold_id,
            first_position=self.transfer.first_page,
            unit_mask=self.transfer.unit_mask,
            delivery=delivery,
            wait_pending=self.wait_pending,
            wait_ms=max(1, int(self.deadline.require_s() * WAIT_SHARE * 1000)),
            hint=self.hint,
        )


@dataclass(frozen=True, slots=True)
class GetReport:
    statuses: NDArray[np.uint8]
    """One a page."""
    bytes_copied: int


@dataclass(frozen=True, slots=True)
class PutOrder:
    """A put, ready to be sent. ``chain`` begins at the transfer's first page, and on the wire
    positions count from there."""

    session_id: bytes
    chain: cache_pb2.Chain
    transfer: Transfer
    lengths: NDArray[np.uint32]
    """One for all, one a page of the transfer, or one a row."""
    variants: NDArray[np.uint16]
    """One for all, or one a page of the transfer."""
    deadline: Deadline
    retention: cache_pb2.Retention | None = None
    hint: cache_pb2.SessionHint | None = None

    def request(self) -> cache_pb2.ReserveRequest:
        """The reservation that comes first."""
        transfer = self.transfer
        chosen = () if transfer.chosen is None else transfer.chosen - transfer.first_page
        return cache_pb2.ReserveRequest(
            session_id=self.session_id,
            chain=self.chain,
            unit_mask=transfer.unit_mask,
            positions=columns.write(chosen, columns.U32),
            unit_lengths=columns.write(self.lengths, columns.U32),
            variants=columns.write(self.variants, columns.U16),
            retention=self.retention,
            hint=self.hint,
        )

    def statuses_of(self, response: cache_pb2.ReserveResponse) -> NDArray[np.uint8]:
        """Status by row. What the answer leaves out was not reserved: ``REJECTED``."""
        answered = known_statuses(columns.read("statuses", response.statuses, columns.U8))
        statuses = np.full(self.transfer.row_count, Status.REJECTED, dtype=np.uint8)
        row_count = min(len(answered), len(statuses))
        statuses[:row_count] = answered[:row_count]
        return statuses

    def rows(self, row_numbers: NDArray[np.int64]) -> Rows:
        """Columns of some rows, their addresses still 0."""
        transfer = self.transfer
        pages = row_numbers // len(transfer.units)
        return Rows(
            rows=row_numbers,
            positions=transfer.positions_of(row_numbers),
            units=transfer.units_of(row_numbers),
            variants=self.variants[pages]
            if len(self.variants) > 1
            else _spread(self.variants, pages),
            lengths=self._lengths_of(row_numbers, pages),
            addresses=np.zeros(len(row_numbers), dtype=np.int64),
        )

    def _lengths_of(
        self, row_numbers: NDArray[np.int64], pages: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        if len(self.lengths) == 1:
            return np.full(len(pages), int(self.lengths[0]), dtype=np.int64)
        by_row = len(self.lengths) == self.transfer.row_count
        return self.lengths[row_numbers if by_row else pages].astype(np.int64)


@dataclass(frozen=True, slots=True)
class PutReport:
    statuses: NDArray[np.uint8]
    """One a row of the transfer."""
    worker_s: float
    """From the start until the source's buffers were free."""
    bytes_put: int
    unpinned_pages: int = 0
    """Those that were to be pinned and are not."""


class Transport(ABC):
    """Moves units. Safe for use by several threads at once; a call never outlives its deadline
    by more than the copy of one slice.

    A get copies only what was asked for, and calls a page ``DONE`` only if all of its wanted
    units were copied and are known to have been whole while they were. A put gives each row a
    status, and no row that was reserved is left behind reserved.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether calls may still succeed."""

    @abstractmethod
    def get(self, order: GetOrder, sink: RowSink) -> GetReport:
        """Delivers pages into ``sink``. Raises OctavoError only if nothing was delivered."""

    @abstractmethod
    def put(self, order: PutOrder, source: RowSource) -> PutReport:
        """Reserves what is missing and hands it over. Raises OctavoError if that is refused."""

    def put_in_rounds(self, order: PutOrder, source: RowSource) -> PutReport:
        """A put, and another one for what found no room, as long as each stores something.

        A node lets reservations take only a part of its memory: a chain larger than that goes
        in several rounds, and what one round stored is present in the next.
        """
        report = self.put(order, source)
        stored = report.statuses == Status.STORED
        progress = stored
        while (report.statuses == Status.NO_ROOM).any() and progress.any():
            if order.deadline.remaining_s() <= 0:
                break
            round_ = self.put(order, source)
            progress = (round_.statuses == Status.STORED) & ~stored
            stored |= progress
            statuses = np.where(stored, np.uint8(Status.STORED), round_.statuses)
            report = PutReport(
                statuses,
                report.worker_s + round_.worker_s,
                report.bytes_put + round_.bytes_put,
                round_.unpinned_pages,  # it offered all of them again
            )
        return report

    @abstractmethod
    def close(self) -> None:
        """Gives up its memory. Calls in progress end with SessionLost."""

    @abstractmethod
    def leave_to_parent(self) -> None:
        """In a forked child: gives up its memory here without a word to the node."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a node answered to a put whose bytes travel over a connection."""

    reservation_id: int
    statuses: NDArray[np.uint8]
    """One a row of the transfer."""
    rows: Rows
    """Those to send, their addresses still 0; none where the node reserved nothing."""
    unpinned_pages: int


def reserve(wire: Wire, order: PutOrder) -> Reservation:
    """Asks for room. Raises OctavoError if that is refused."""
    response = wire.unary(wire.cache.Reserve, order.request(), order.deadline)
    statuses = order.statuses_of(response)
    rows = order.rows(np.flatnonzero(statuses == Status.RESERVED))
    if response.reservation_id == 0:
        statuses[rows.rows] = Status.REJECTED
        rows = rows.take(0, 0)
    return Reservation(response.reservation_id, statuses, rows, response.unpinned_count)


def abort(wire: Wire, session_id: bytes, reservation_id: int, health: HealthRecorder) -> None:
    """Gives up what is left of a reservation, without waiting for the answer."""
    request = cache_pb2.AbortRequest(session_id=session_id, reservation_id=reservation_id)
    try:
        wire.send(wire.cache.Abort, request, ABORT_TIMEOUT_S)
    except OctavoError as error:  # the reservation then ends by its own time
        health.failure("abort_failed", error)


def _spread(single: NDArray[np.uint16], pages: NDArray[np.int64]) -> NDArray[np.uint16]:
    return np.full(len(pages), int(single[0]) if len(single) else 0, dtype=np.uint16)
