"""A put through the staging ring: reserve, fill, commit, batch by batch and overlapping.

While the node copies one batch out of the ring and checks it, the worker fills the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from octavo.deadline import Deadline
from octavo.errors import ConnectError, NodeFailed, NodeTimeout, NodeUnavailable
from octavo.health import HealthRecorder
from octavo.status import Status, known_statuses
from octavo.transfer import Rows, RowSource, cut
from octavo.transport.base import RENEW_SHARE, PutOrder, PutReport, abort
from octavo.transport.mapping import SharedMappings
from octavo.transport.ring import ALIGNMENT, Ring, Span
from octavo.wire import Pending, Wire, translate
from octavo_proto import columns
from octavo_proto.v1 import cache_pb2

BATCH_BYTES: Final = 128 << 20
"""Bytes of one commit, and at most half of the ring. Filling the ring and the node's copy out of
it share one memory's bandwidth: on two cores, 210 MB in commits of 32, 64 and 128 MiB left the
worker at 0.42-0.68, 0.47-0.80 and 0.69-0.95 of torch's speed, and were visible no later."""

BATCH_ROWS: Final = 1024
"""Units of one commit; bounds the message and the node's work for it where units are small."""

IN_FLIGHT_MAX: Final = 64
"""Commits that wait for their answers. Their bytes are bounded by the ring, so that a worker
whose pages fit into it never waits for the node to copy them."""

COMMIT_GRACE_S: Final = 5.0
"""A commit may answer this long after the put's deadline. Until it does, its part of the ring
is not used again; after that, the whole ring is given up."""


class StagedPut:
    """One put. Used by one thread; its commits' callbacks run on gRPC's."""

    def __init__(
        self,
        wire: Wire,
        mappings: SharedMappings,
        ring: Ring,
        order: PutOrder,
        health: HealthRecorder,
        give_up_ring: Callable[[], None],
    ) -> None:
        self._wire = wire
        self._mappings = mappings
        self._ring = ring
        self._order = order
        self._health = health
        self._give_up_ring = give_up_ring
        self._statuses: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._in_flight: list[tuple[Pending[Any], NDArray[np.int64]]] = []
        self._bytes_put = 0

    def run(self, source: RowSource) -> PutReport:
        started_s = time.monotonic()
        order, wire = self._order, self._wire
        reserved = wire.unary(wire.cache.Reserve, order.request(), order.deadline)
        self._statuses = order.statuses_of(reserved)
        rows = order.rows(np.flatnonzero(self._statuses == Status.RESERVED))
        rows = self._drop_too_large(rows)
        worker_s = time.monotonic() - started_s
        if reserved.reservation_id == 0:
            self._close_open_rows(Status.REJECTED)
            return PutReport(self._statuses, worker_s, 0, reserved.unpinned_count)
        node_ended_it = False
        try:
            commit_count = self._fill_and_commit(rows, reserved, source)
            node_ended_it = commit_count == 1  # it said that it is the last, answered or not
            worker_s = time.monotonic() - started_s
            self._collect(0)
        except NodeUnavailable as error:
            # Some rows may be stored already, and each row of a call gets its status.
            self._health.failure("put_cut_short", error)
            worker_s = time.monotonic() - started_s
            self._collect_what_is_there()
        finally:
            if not node_ended_it:
                abort(wire, order.session_id, reserved.reservation_id, self._health)
        self._close_open_rows(Status.UNAVAILABLE)
        return PutReport(self._statuses, worker_s, self._bytes_put, reserved.unpinned_count)

    def _fill_and_commit(
        self, rows: Rows, reserved: cache_pb2.ReserveResponse, source: RowSource
    ) -> int:
        """Hands all rows over, not yet answered. Returns the number of commits."""
        commit_count = 0
        renew_at_s = time.monotonic() + reserved.reservation_ms / 1000 * RENEW_SHARE
        sizes = padded(rows.lengths)
        batch_bytes = min(BATCH_BYTES, self._ring.size_bytes // 2)
        for begin, end in cut(sizes, batch_bytes, BATCH_ROWS):
            self._collect(IN_FLIGHT_MAX - 1)
            span = self._ring.take(int(sizes[begin:end].sum()), self._order.deadline)
            try:
                offsets = span.offset + np.cumsum(sizes[begin:end]) - sizes[begin:end]
                batch = placed(rows.take(begin, end), self._mappings.ring_address + offsets)
                with self._mappings.in_use():
                    source.fill_rows(batch)
                # The node ends a reservation with its last commit, which may overtake earlier
                # ones on their way there: only a commit that is alone says so.
                alone = begin == 0 and end == len(rows)
                pending = self._start_commit(batch, offsets, reserved.reservation_id, last=alone)
            except BaseException:
                self._ring.give_back(span)
                raise
            pending.add_done_callback(self._on_answer(span))
            self._in_flight.append((pending, batch.rows))
            self._bytes_put += batch.size_bytes
            commit_count += 1
            if time.monotonic() >= renew_at_s:
                renew_at_s = time.monotonic() + reserved.reservation_ms / 1000 * RENEW_SHARE
                self._renew(reserved.reservation_id)
        return commit_count

    def _start_commit(
        self, batch: Rows, offsets: NDArray[np.int64], reservation_id: int, *, last: bool
    ) -> Pending[Any]:
        request = cache_pb2.CommitRequest(
            session_id=self._order.session_id,
            reservation_id=reservation_id,
            positions=columns.write(batch.positions - self._order.transfer.first_page, columns.U32),
            units=columns.write(batch.units, columns.U8),
            ring_offsets=columns.write(offsets, columns.U64),
            lengths=columns.write(batch.lengths, columns.U32),
            last=last,
        )
        timeout_s = self._order.deadline.require_s() + COMMIT_GRACE_S
        return self._wire.start(self._wire.cache.Commit, request, timeout_s)

    def _on_answer(self, span: Span) -> Callable[[Any], None]:
        def answered(pending: Any) -> None:
            error = pending.exception() if not pending.cancelled() else None
            if pending.cancelled() or _may_still_be_read(error):
                self._give_up_ring()
            else:
                self._ring.give_back(span)

        return answered

    def _collect(self, leave: int) -> None:
        """Waits until at most ``leave`` commits are unanswered."""
        while len(self._in_flight) > leave:
            pending, rows = self._in_flight[0]
            self._read_answer(pending, rows, self._order.deadline)
            del self._in_flight[0]

    def _collect_what_is_there(self) -> None:
        for pending, rows in self._in_flight:
            if pending.done():  # type: ignore[attr-defined]
                try:
                    self._read_answer(pending, rows, self._order.deadline)
                except NodeUnavailable as error:
                    self._health.failure("commit_failed", error)
        self._in_flight.clear()

    def _read_answer(
        self, pending: Pending[Any], rows: NDArray[np.int64], deadline: Deadline
    ) -> None:
        response = answer_of(pending, deadline)
        answered = known_statuses(columns.read("statuses", response.statuses, columns.U8))
        if len(answered) != len(rows):
            self._health.count("commit_answer_malformed")
            self._statuses[rows] = Status.REJECTED
            return
        self._statuses[rows] = answered

    def _drop_too_large(self, rows: Rows) -> Rows:
        fits = padded(rows.lengths) <= self._ring.size_bytes
        if fits.all():
            return rows
        self._statuses[rows.rows[~fits]] = Status.TOO_LARGE
        return self._order.rows(rows.rows[fits])

    def _close_open_rows(self, status: Status) -> None:
        self._statuses[self._statuses == Status.RESERVED] = status

    def _renew(self, reservation_id: int) -> None:
        request = cache_pb2.RenewRequest(
            session_id=self._order.session_id,
            reservation_ids=columns.write([reservation_id], columns.U64),
        )
        self._wire.send(self._wire.cache.Renew, request, COMMIT_GRACE_S)


def padded(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Room that each row takes in the ring."""
    return (lengths + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def placed(rows: Rows, addresses: NDArray[np.int64]) -> Rows:
    """The rows with their addresses."""
    return Rows(rows.rows, rows.positions, rows.units, rows.variants, rows.lengths, addresses)


def answer_of(pending: Pending[Any], deadline: Deadline) -> cache_pb2.CommitResponse:
    """The answer of a commit. Cancelling the task that waits does not cancel the commit: one
    that is not answered costs the session its ring.

    Raises:
        OctavoError: see the table in ``errors``.
    """

    try:
        response: cache_pb2.CommitResponse = pending.result(timeout=deadline.require_s())
    except grpc.FutureTimeoutError:
        raise NodeTimeout("a commit was not answered in time") from None
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        raise translate(error) from None
    return response


def _may_still_be_read(error: BaseException | None) -> bool:
    """Whether the node may still be copying from the ring although the call ended."""

    if error is None:
        return False
    if not isinstance(error, grpc.RpcError):
        return True
    return isinstance(translate(error), ConnectError | NodeTimeout | NodeFailed)
