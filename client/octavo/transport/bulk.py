"""Unit bytes over plain TCP streams, for workers that cannot map the node's memory.

Names, leases and reservations travel over gRPC as ever; the bytes of what was granted or
reserved go over the streams, straight into the sink's memory and out of the source's where these
have such. What came is trusted because of its digest, which the grant told over gRPC. Where the
bulk port is out of reach, gRPC carries the bytes as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from octavo.deadline import CallScope, current_scope
from octavo.delivery import DeliveryLedger
from octavo.errors import CallCancelled, NodeFailed, NodeUnavailable
from octavo.health import HealthRecorder
from octavo.memory import region_of
from octavo.status import Status
from octavo.transfer import PlacingSink, PlacingSource, Rows, RowSink, RowSource, cut
from octavo.transport.base import (
    GetOrder,
    GetReport,
    PutOrder,
    PutReport,
    Transport,
    abort,
    reserve,
)
from octavo.transport.bulk_parts import GetPart, Identity, PutPart
from octavo.transport.bulk_socket import BulkSocket
from octavo.transport.bulk_streams import Call, Streams
from octavo.transport.inline import InlineTransport
from octavo.transport.leases import Leases
from octavo.transport.staging import placed
from octavo.wire import Wire
from octavo_proto import bulk, columns
from octavo_proto.v1 import cache_pb2

STREAMS: Final = 4
"""Connections of one client: enough to use several processors and queues of a network card."""

SCRATCH_BYTES: Final = 32 << 20
"""What one call takes besides the worker's own buffers, where bytes can't go to them directly."""


class BulkTransport(Transport):
    """Bytes travel over streams that the session's threads share."""

    name: ClassVar[str] = "bulk"

    def __init__(
        self,
        wire: Wire,
        session_id: bytes,
        unit_bytes_max: int,
        connect: Callable[[float], BulkSocket],
        first: BulkSocket,
        health: HealthRecorder,
    ) -> None:
        """``first`` is open already; ``connect`` opens more within so many seconds."""
        self._wire = wire
        self._session_id = session_id
        self._unit_bytes_max = unit_bytes_max
        self._health = health
        self._streams = Streams(connect, STREAMS, first, health)
        self._inline = InlineTransport(wire, health)

    @property
    def alive(self) -> bool:
        return self._inline.alive

    def close(self) -> None:
        self._inline.close()
        self._streams.close()

    def leave_to_parent(self) -> None:
        self._inline.leave_to_parent()
        self._streams.leave_to_parent()

    def get(self, order: GetOrder, sink: RowSink) -> GetReport:
        if self._streams.usable:
            ledger = self._get(order, sink)
            # What could not move at all for want of a stream is worth the slower way.
            late = order.deadline.remaining_s() <= 0
            if ledger.arrived_count or self._streams.usable or late:
                return GetReport(ledger.statuses(), ledger.bytes_copied)
        self._health.count("bulk_fell_back")
        return self._inline.get(order, sink)

    def put(self, order: PutOrder, source: RowSource) -> PutReport:
        if self._streams.usable:
            return self._put(order, source)
        self._health.count("bulk_fell_back")
        return self._inline.put(order, source)

    def _get(self, order: GetOrder, sink: RowSink) -> DeliveryLedger:
        ledger = DeliveryLedger(order.transfer)
        # What came is good by its digest, so no answer about a lease is waited for too long.
        leases = Leases(self._wire, self._session_id, order.deadline, self._health, grace_s=0.0)
        call = Call(self._streams, time.monotonic() + order.deadline.require_s())
        arriving = _Arriving(order, sink, ledger, leases, call, self._health)
        stream = self._wire.get(order.request(cache_pb2.DELIVERY_BULK), order.deadline)
        scope = current_scope.get() or CallScope()
        try:
            with scope.watching(call):
                for response in stream:
                    part = response.WhichOneof("part")
                    if part == "grants":
                        arriving.ask(response.grants, self._unit_bytes_max)
                    elif part == "outcome":
                        ledger.close(
                            columns.read("statuses", response.outcome.statuses, columns.U8)
                        )
                arriving.collect_all()
        except CallCancelled:
            raise
        except NodeUnavailable as error:
            if ledger.arrived_count == 0 and call.open_count == 0:
                raise
            self._health.failure("get_cut_short", error)
        finally:
            stream.close()
            call.close()
            arriving.release_rest()
            leases.settle(ledger)
        if arriving.asked_count and not arriving.answered_count:
            self._streams.doubt()
        return ledger

    def _put(self, order: PutOrder, source: RowSource) -> PutReport:
        started_s = time.monotonic()
        wire = self._wire
        reserved = reserve(wire, order)
        statuses = reserved.statuses
        if len(reserved.rows) == 0:
            worker_s = time.monotonic() - started_s
            return PutReport(statuses, worker_s, 0, reserved.unpinned_pages)
        call = Call(self._streams, time.monotonic() + order.deadline.require_s())
        departing = _Departing(order, source, statuses, reserved.reservation_id, call)
        scope = current_scope.get() or CallScope()
        try:
            with scope.watching(call):
                departing.send(reserved.rows)
        except CallCancelled:
            raise
        except NodeUnavailable as error:
            self._health.failure("put_cut_short", error)
        finally:
            call.close()
            abort(wire, order.session_id, reserved.reservation_id, self._health)
        if not departing.bytes_put:
            self._streams.doubt()
        statuses[statuses == Status.RESERVED] = Status.UNAVAILABLE
        worker_s = time.monotonic() - started_s
        return PutReport(statuses, worker_s, departing.bytes_put, reserved.unpinned_pages)


class _Scratch:
    """Memory for parts whose bytes can't go to the worker's buffers directly."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self.used_bytes = 0

    def take(self, rows: Rows) -> tuple[bytearray, Rows]:
        """A buffer for the bytes of rows, and the rows placed in it one behind the other."""
        self.used_bytes += rows.size_bytes
        buffer = self._buffer_of(rows.size_bytes)
        starts = np.cumsum(rows.lengths) - rows.lengths
        return buffer, placed(rows, region_of(buffer).address + starts)

    def give_back(self, buffer: bytearray, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._free.append(buffer)

    def has_room(self, size_bytes: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + size_bytes <= SCRATCH_BYTES

    def _buffer_of(self, size_bytes: int) -> bytearray:
        for index, buffer in enumerate(self._free):
            if len(buffer) >= size_bytes:
                return self._free.pop(index)
        return bytearray(max(size_bytes, bulk.PART_BYTES))


class _Arriving:
    """One get: what was granted, is being received, and has come. Used by one thread."""

    def __init__(
        self,
        order: GetOrder,
        sink: RowSink,
        ledger: DeliveryLedger,
        leases: Leases,
        call: Call,
        health: HealthRecorder,
    ) -> None:
        self._sink = sink
        self._placing = sink if isinstance(sink, PlacingSink) else None
        self._ledger = ledger
        self._leases = leases
        self._call = call
        self._health = health
        self._identity = Identity(order.chain.keys, order.fingerprint, 0)
        self._scratch = _Scratch()
        self._buffers: dict[GetPart, bytearray] = {}
        self._open_parts: dict[int, int] = {}  # by lease
        self.asked_count = 0
        self.answered_count = 0

    def ask(self, grants: cache_pb2.GrantBatch, unit_bytes_max: int) -> None:
        """Asks for all units of a grant; takes in what has come meanwhile."""
        self._open_parts[grants.lease_id] = 1  # this loop's own
        rows, digests, wanted = _granted(grants, self._ledger, unit_bytes_max)
        for first, end in _runs(wanted):
            run = rows.take(first, end)
            for begin, stop in cut(run.lengths, bulk.PART_BYTES, bulk.ROWS_MAX):
                part_digests = digests[first + begin : first + stop]
                self._submit(grants.lease_id, first + begin, run.take(begin, stop), part_digests)
        self._end_part(grants.lease_id)

    def collect_all(self) -> None:
        """Takes in everything that was asked for."""
        while self._collect(wait=True):
            pass

    def release_rest(self) -> None:
        """Ends the leases of parts that were not collected."""
        for lease_id in tuple(self._open_parts):
            self._leases.release(lease_id, np.zeros(0, dtype=np.int64))
        self._open_parts.clear()

    def _submit(
        self,
        lease_id: int,
        first: int,
        rows: Rows,
        digests: NDArray[np.uint64],
    ) -> None:
        buffer = None
        if self._placing is not None:
            rows = placed(rows, self._placing.places_of(rows))
        else:
            while not self._scratch.has_room(rows.size_bytes):
                self._collect(wait=True)
            buffer, rows = self._scratch.take(rows)
        part = GetPart(self._call, self._identity, lease_id, first, rows, digests)
        if buffer is not None:
            self._buffers[part] = buffer
        self._open_parts[lease_id] += 1
        self.asked_count += 1
        self._call.submit(part)
        self._collect(wait=False)

    def _collect(self, *, wait: bool) -> bool:
        """Takes in parts that have ended; whether there was one."""
        part = self._call.collect(wait=wait)
        if part is None:
            return False
        assert isinstance(part, GetPart)
        buffer = self._buffers.pop(part, None)
        try:
            self._take_in(part)
        finally:
            if buffer is not None:
                self._scratch.give_back(buffer, part.rows.size_bytes)
            self._end_part(part.lease_id)
        return True

    def _take_in(self, part: GetPart) -> None:
        if part.error is not None:
            return  # counted where the stream broke; the pages are UNAVAILABLE
        self.answered_count += 1
        if part.refused is not None:
            self._health.count("bulk_refused")
            if part.refused == Status.EXPIRED:
                self._ledger.expired(part.rows.rows)
            return
        good = part.rows
        if not part.whole.all():
            self._health.count("bulk_digest_mismatch", int(np.count_nonzero(~part.whole)))
            self._ledger.corrupt(part.rows.rows[~part.whole])
            good = part.rows.chosen(part.whole)
        if self._placing is not None:
            self._placing.placed(good)
        else:
            self._sink.accept_rows(good)
        self._ledger.copied(len(good), good.size_bytes)
        self._ledger.good(good.rows)

    def _end_part(self, lease_id: int) -> None:
        self._open_parts[lease_id] -= 1
        if not self._open_parts[lease_id]:
            del self._open_parts[lease_id]
            self._leases.release(lease_id, np.zeros(0, dtype=np.int64))


class _Departing:
    """One put: what is being sent. Used by one thread."""

    def __init__(
        self,
        order: PutOrder,
        source: RowSource,
        statuses: NDArray[np.uint8],
        reservation_id: int,
        call: Call,
    ) -> None:
        self._source = source
        self._placing = source if isinstance(source, PlacingSource) else None
        self._statuses = statuses
        self._reservation_id = reservation_id
        self._call = call
        first_page = order.transfer.first_page
        fingerprint = order.transfer.layout.fingerprint()
        self._identity = Identity(order.chain.keys, fingerprint, first_page)
        self._scratch = _Scratch()
        self._buffers: dict[PutPart, bytearray] = {}
        self.bytes_put = 0

    def send(self, rows: Rows) -> None:
        """Hands over all rows and enters the node's account of them."""
        for begin, end in cut(rows.lengths, bulk.PART_BYTES, bulk.ROWS_MAX):
            piece = rows.take(begin, end)
            buffer = None
            if self._placing is not None:
                piece = placed(piece, self._placing.places_of(piece))
            else:
                while not self._scratch.has_room(piece.size_bytes):
                    self._collect(wait=True)
                buffer, piece = self._scratch.take(piece)
                self._source.fill_rows(piece)
            part = PutPart(self._call, self._identity, self._reservation_id, piece)
            if buffer is not None:
                self._buffers[part] = buffer
            self._call.submit(part)
            self._collect(wait=False)
        while self._collect(wait=True):
            pass

    def _collect(self, *, wait: bool) -> bool:
        part = self._call.collect(wait=wait)
        if part is None:
            return False
        assert isinstance(part, PutPart)
        buffer = self._buffers.pop(part, None)
        if buffer is not None:
            self._scratch.give_back(buffer, part.rows.size_bytes)
        self._statuses[part.rows.rows] = part.statuses
        if part.error is None:
            self.bytes_put += part.rows.size_bytes
        return True


def _granted(
    grants: cache_pb2.GrantBatch, ledger: DeliveryLedger, unit_bytes_max: int
) -> tuple[Rows, NDArray[np.uint64], NDArray[np.bool_]]:
    """The granted units in the grant's order, their digests, and which of them were asked for.

    Raises:
        NodeFailed: columns that contradict each other or the node's limits.
    """
    try:
        positions = columns.read("positions", grants.positions, columns.U32).astype(np.int64)
        row_count = len(positions)
        units = columns.read("units", grants.units, columns.U8, row_count)
        lengths = columns.read("lengths", grants.lengths, columns.U32, row_count).astype(np.int64)
        variants = columns.read("variants", grants.variants, columns.U16, row_count)
        digests = columns.read("digests", grants.digests, columns.U64, row_count)
    except columns.ColumnError as error:
        raise NodeFailed(f"grant: {error}") from None
    if row_count and not 0 < int(lengths.min()) <= int(lengths.max()) <= unit_bytes_max:
        raise NodeFailed("grant: a unit is longer than the node says that any is")
    found, wanted = ledger.rows_of(positions, units)
    addresses = np.zeros(row_count, dtype=np.int64)
    return Rows(found, positions, units, variants, lengths, addresses), digests, wanted


def _runs(wanted: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive wanted rows."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
