"""Shared memory: pages are copied straight from the arena, and put through the staging ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from octavo.delivery import DeliveryLedger
from octavo.errors import CallCancelled, NodeFailed, NodeUnavailable
from octavo.health import HealthRecorder
from octavo.transfer import Rows, RowSink, RowSource
from octavo.transport.base import GetOrder, GetReport, PutOrder, PutReport, Transport
from octavo.transport.broker import BrokerLink
from octavo.transport.leases import Leases
from octavo.transport.ring import Ring
from octavo.transport.staging import StagedPut
from octavo.wire import Wire
from octavo_proto import columns
from octavo_proto.v1 import cache_pb2


class ShmTransport(Transport):
    """Needs a node on this host whose broker gave this session its descriptors."""

    name: ClassVar[str] = "shm"

    def __init__(
        self,
        wire: Wire,
        session_id: bytes,
        link: BrokerLink,
        health: HealthRecorder,
        on_lost: Callable[[], None],
    ) -> None:
        """``on_lost`` is called from another thread when the node withdraws the memory."""
        self._wire = wire
        self._session_id = session_id
        self._link = link
        self._mappings: Final = link.mappings
        self._ring: Final = Ring(link.mappings.ring_bytes)
        self._health = health

        def hung_up() -> None:
            self._ring.close()
            health.count("memory_withdrawn")
            on_lost()

        link.watch(hung_up)

    @property
    def alive(self) -> bool:
        return not self._mappings.closed

    @property
    def ring(self) -> Ring:
        return self._ring

    def close(self) -> None:
        self._ring.close()
        self._link.close()

    def leave_to_parent(self) -> None:
        self._link.leave_to_parent()

    def get(self, order: GetOrder, sink: RowSink) -> GetReport:
        ledger = DeliveryLedger(order.transfer)
        leases = Leases(self._wire, self._session_id, order.deadline, self._health)
        stream = self._wire.get(order.request(cache_pb2.DELIVERY_GRANTS), order.deadline)
        try:
            for response in stream:
                part = response.WhichOneof("part")
                if part == "grants":
                    self._take(response.grants, sink, ledger, leases)
                elif part == "outcome":
                    ledger.close(columns.read("statuses", response.outcome.statuses, columns.U8))
        except CallCancelled:
            raise
        except NodeUnavailable as error:
            if ledger.arrived_count == 0:
                raise
            self._health.failure("get_cut_short", error)
        finally:
            stream.close()
            leases.settle(ledger)
        return GetReport(ledger.statuses(), ledger.bytes_copied)

    def put(self, order: PutOrder, source: RowSource) -> PutReport:
        staged = StagedPut(self._wire, self._mappings, self._ring, order, self._health, self.close)
        return staged.run(source)

    def _take(
        self, grants: cache_pb2.GrantBatch, sink: RowSink, ledger: DeliveryLedger, leases: Leases
    ) -> None:
        """Copies one batch and releases its lease, whatever happens in between."""
        copied: list[NDArray[np.int64]] = []
        renew_if_due = leases.renewer(grants.lease_id, grants.lease_ms)
        try:
            rows = self._locate(grants, ledger)
            for piece in rows.slices():
                with self._mappings.in_use():
                    sink.accept_rows(piece)
                ledger.copied(len(piece), piece.size_bytes)
                copied.append(piece.rows)
                renew_if_due()
        finally:
            done = np.concatenate(copied) if copied else np.zeros(0, dtype=np.int64)
            leases.release(grants.lease_id, done)

    def _locate(self, grants: cache_pb2.GrantBatch, ledger: DeliveryLedger) -> Rows:
        """Addresses of the granted rows that were asked for.

        Raises:
            NodeFailed: columns that contradict each other or point outside of the arena.
        """
        try:
            positions = columns.read("positions", grants.positions, columns.U32).astype(np.int64)
            row_count = len(positions)
            units = _column("units", grants.units, columns.U8, row_count)
            segments = _column("segments", grants.segments, columns.U16, row_count)
            offsets = _column("offsets", grants.offsets, columns.U64, row_count)
            lengths = _column("lengths", grants.lengths, columns.U32, row_count).astype(np.int64)
            variants = _column("variants", grants.variants, columns.U16, row_count)
        except columns.ColumnError as error:
            raise NodeFailed(f"grant: {error}") from None
        segment_bytes = self._mappings.segment_bytes
        # A wrong address would be read by memmove without question, so each one is checked.
        inside = (segments < len(self._mappings.segment_addresses)) & (
            offsets <= np.maximum(segment_bytes - lengths, 0).astype(np.uint64)
        )
        inside &= lengths <= segment_bytes
        if not inside.all():
            raise NodeFailed("grant: a row points outside of the arena")
        rows, wanted = ledger.rows_of(positions, units)
        found = Rows(
            rows=rows,
            positions=positions,
            units=units,
            variants=variants,
            lengths=lengths,
            addresses=self._mappings.segment_addresses[segments] + offsets.astype(np.int64),
        )
        return found if wanted.all() else found.chosen(wanted)


def _column(name: str, data: bytes, dtype: np.dtype[Any], row_count: int) -> NDArray[Any]:
    return columns.read(name, data, dtype, row_count)
