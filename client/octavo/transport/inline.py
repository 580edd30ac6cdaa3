"""Inline bytes in gRPC messages: slower, but works wherever a connection does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from octavo.chain import key_at
from octavo.delivery import DeliveryLedger
from octavo.errors import CallCancelled, NodeUnavailable
from octavo.health import HealthRecorder
from octavo.memory import region_of, view_at
from octavo.status import Status, known_statuses
from octavo.transfer import Rows, RowSink, RowSource
from octavo.transport.assembly import Assembler, Unit
from octavo.transport.base import (
    GetOrder,
    GetReport,
    PutOrder,
    PutReport,
    Transport,
    abort,
    reserve,
)
from octavo.transport.staging import placed
from octavo.wire import Wire
from octavo_proto import columns
from octavo_proto.keys import digest_seed, unit_digest
from octavo_proto.limits import INLINE_PIECE_BYTES
from octavo_proto.v1 import cache_pb2

BATCH_BYTES: Final = 4 << 20
"""Units are handed to the sink, and drawn from the source, in batches of about this size: the
memory that a get or put takes besides its buffers."""

BATCH_ROWS: Final = 256


class InlineTransport(Transport):
    """Bytes travel in the messages and are checked against the node's digest on arrival."""

    name: ClassVar[str] = "grpc"

    def __init__(self, wire: Wire, health: HealthRecorder) -> None:
        self._wire = wire
        self._health = health
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed

    def close(self) -> None:
        self._closed = True

    def leave_to_parent(self) -> None:
        self._closed = True

    def get(self, order: GetOrder, sink: RowSink) -> GetReport:
        ledger = DeliveryLedger(order.transfer)
        assembler = Assembler()
        batch: list[Unit] = []
        batch_bytes = 0
        stream = self._wire.get(order.request(cache_pb2.DELIVERY_INLINE), order.deadline)
        try:
            for response in stream:
                part = response.WhichOneof("part")
                if part == "data":
                    unit = assembler.add(response.data)
                    if unit is not None:
                        batch.append(unit)
                        batch_bytes += len(unit.data)
                    if batch_bytes >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
                        self._deliver(batch, order, sink, ledger)
                        batch, batch_bytes = [], 0
                elif part == "outcome":
                    ledger.close(columns.read("statuses", response.outcome.statuses, columns.U8))
        except CallCancelled:
            raise
        except NodeUnavailable as error:
            if ledger.arrived_count == 0 and not batch:
                raise
            self._health.failure("get_cut_short", error)
        finally:
            stream.close()
        self._deliver(batch, order, sink, ledger)
        return GetReport(ledger.statuses(), ledger.bytes_copied)

    def put(self, order: PutOrder, source: RowSource) -> PutReport:
        started_s = time.monotonic()
        wire = self._wire
        reserved = reserve(wire, order)
        statuses = reserved.statuses
        if len(reserved.rows) == 0:
            worker_s = time.monotonic() - started_s
            return PutReport(statuses, worker_s, 0, reserved.unpinned_pages)
        sender = _Sender(order, reserved.rows, reserved.reservation_id, source)
        node_ended_it = False
        try:
            response = wire.put(sender, order.deadline)
            node_ended_it = True
            self._record(response, order, statuses)
        except NodeUnavailable as error:
            self._health.failure("put_cut_short", error)
        finally:
            sender.stop()
            if not node_ended_it:
                abort(wire, order.session_id, reserved.reservation_id, self._health)
        if sender.error is not None:
            raise sender.error
        statuses[statuses == Status.RESERVED] = Status.UNAVAILABLE
        ended_s = sender.ended_s or time.monotonic()
        worker_s = ended_s - started_s
        return PutReport(statuses, worker_s, sender.bytes_sent, reserved.unpinned_pages)

    def _deliver(
        self, batch: list[Unit], order: GetOrder, sink: RowSink, ledger: DeliveryLedger
    ) -> None:
        if not batch:
            return
        positions = np.array([unit.position for unit in batch], dtype=np.int64)
        units = np.array([unit.unit for unit in batch], dtype=np.uint8)
        rows, wanted = ledger.rows_of(positions, units)
        whole = np.array([digest_is_right(unit, order) for unit in batch], dtype=np.bool_)
        if not whole.all():
            self._health.count("inline_digest_mismatch", int(np.count_nonzero(~whole)))
            ledger.corrupt(rows[~whole & wanted])
        chosen = whole & wanted
        kept = [unit for unit, keep in zip(batch, chosen.tolist(), strict=True) if keep]
        regions = [region_of(unit.data) for unit in kept]
        arrived = Rows(
            rows=rows[chosen],
            positions=positions[chosen],
            units=units[chosen],
            variants=np.array([unit.variant for unit in kept], dtype=np.uint16),
            lengths=np.array([region.size_bytes for region in regions], dtype=np.int64),
            addresses=np.array([region.address for region in regions], dtype=np.int64),
        )
        sink.accept_rows(arrived)
        ledger.copied(len(arrived), arrived.size_bytes)
        ledger.good(arrived.rows)

    def _record(
        self, response: cache_pb2.PutResponse, order: PutOrder, statuses: NDArray[np.uint8]
    ) -> None:
        """Enters the node's account, row by row, into ``statuses``."""
        positions = columns.read("positions", response.positions, columns.U32).astype(np.int64)
        units = columns.read("units", response.units, columns.U8, len(positions))
        answered = columns.read("statuses", response.statuses, columns.U8, len(positions))
        ledger = DeliveryLedger(order.transfer)
        rows, offered = ledger.rows_of(positions + order.transfer.first_page, units)
        statuses[rows[offered]] = known_statuses(answered[offered])


class _Sender:
    """Draws units from the source and cuts them into messages. Consumed by gRPC's thread."""

    def __init__(self, order: PutOrder, rows: Rows, reservation_id: int, source: RowSource) -> None:
        self._order = order
        self._rows = rows
        self._reservation_id = reservation_id
        self._source = source
        self._filling = threading.Lock()
        self._stopped = False
        self.error: BaseException | None = None
        self.ended_s = 0.0
        self.bytes_sent = 0

    def stop(self) -> None:
        """The source is not used any more once this returns: a call that ended early may have
        left gRPC's thread in the middle of a fill."""
        with self._filling:
            self._stopped = True

    def __iter__(self) -> Iterator[cache_pb2.PutRequest]:
        try:
            yield cache_pb2.PutRequest(
                header=cache_pb2.PutHeader(
                    session_id=self._order.session_id,
                    reservation_id=self._reservation_id,
                    last=True,
                )
            )
            for batch in self._rows.slices(BATCH_BYTES):
                yield from self._pieces(batch)
            self.ended_s = time.monotonic()
        except Exception as error:  # noqa: BLE001 - kept, and raised by the thread that put
            # Ending here ends the stream between two units: what was sent whole is stored.
            self.error = error

    def _pieces(self, batch: Rows) -> Iterator[cache_pb2.PutRequest]:
        scratch = bytearray(batch.size_bytes)
        region = region_of(scratch)
        ends = np.cumsum(batch.lengths)
        with self._filling:
            if self._stopped:
                return
            self._source.fill_rows(placed(batch, region.address + ends - batch.lengths))
        first_page = self._order.transfer.first_page
        for position, unit, length, end in zip(
            batch.positions.tolist(),
            batch.units.tolist(),
            batch.lengths.tolist(),
            ends.tolist(),
            strict=True,
        ):
            begin = end - length
            for offset in range(0, length, INLINE_PIECE_BYTES):
                size_bytes = min(INLINE_PIECE_BYTES, length - offset)
                data = bytes(view_at(region.address + begin + offset, size_bytes))
                self.bytes_sent += size_bytes
                yield cache_pb2.PutRequest(
                    data=cache_pb2.PutData(
                        position=position - first_page, unit=unit, offset=offset, data=data
                    )
                )


def digest_is_right(unit: Unit, order: GetOrder) -> bool:
    """Whether the bytes are those that were put as this unit of this page, whole and unchanged."""
    key = key_at(order.chain.keys, unit.position)
    if len(key) == 0:
        return False
    seed = digest_seed(key, order.fingerprint, unit.unit, unit.variant, len(unit.data))
    return unit_digest(unit.data, seed) == unit.digest
