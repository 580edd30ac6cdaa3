"""How granted pages reach the client: as grants into shared memory, or as bytes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo_proto import columns
from octavo_proto.limits import INLINE_PIECE_BYTES
from octavo_proto.v1 import cache_pb2
from octavo_server.cache.getting import GetPages, Grant, Outcome
from octavo_server.cache.leases import LeasedUnits
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import DONE, EXPIRED, GRANTED


class Delivery(Protocol):
    """Turns what a get yields into messages."""

    def responses(self, asked: GetPages, item: Grant | Outcome) -> Generator[cache_pb2.GetResponse]:
        """Messages for one item."""
        ...


class GrantDelivery:
    """Says where the units lie; the client copies, then releases the lease."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache

    def responses(self, asked: GetPages, item: Grant | Outcome) -> Generator[cache_pb2.GetResponse]:
        if isinstance(item, Outcome):
            yield _outcome(item.statuses)
            return
        table, segment_bytes = self._cache.table, self._cache.memory.arena.segment_bytes
        unit_rows = table.unit_rows(item.rows, asked.units).ravel()
        grants = _grants(self._cache, asked, item, table.units.length[unit_rows])
        places = table.units.memory_offset[unit_rows]
        segments = places // segment_bytes
        generations = np.repeat(table.generation[item.rows], len(asked.units))
        grants.segments = columns.write(segments, columns.U16)
        grants.offsets = columns.write(places - segments * segment_bytes, columns.U64)
        grants.generations = columns.write(generations, columns.U32)
        yield cache_pb2.GetResponse(grants=grants)


class BulkDelivery:
    """Says which units there are and what their digests are; the client asks for them on bulk
    streams by their place in the grant, then releases the lease."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache

    def responses(self, asked: GetPages, item: Grant | Outcome) -> Generator[cache_pb2.GetResponse]:
        if isinstance(item, Outcome):
            yield _outcome(item.statuses)
            return
        table = self._cache.table
        unit_rows = table.unit_rows(item.rows, asked.units).ravel()
        lengths = table.units.length[unit_rows]
        grants = _grants(self._cache, asked, item, lengths)
        grants.digests = columns.write(table.units.digest[unit_rows], columns.U64)
        item.lease.bulk_units = LeasedUnits(
            pages=np.repeat(item.rows, len(asked.units)),
            places=table.units.memory_offset[unit_rows],
            lengths=lengths.astype(np.int64),
        )
        yield cache_pb2.GetResponse(grants=grants)


class InlineDelivery:
    """Sends the bytes, and releases each lease when they are on their way."""

    def __init__(self, cache: PageCache, session: Session) -> None:
        self._cache = cache
        self._session = session
        self._expired: list[int] = []

    def responses(self, asked: GetPages, item: Grant | Outcome) -> Generator[cache_pb2.GetResponse]:
        if isinstance(item, Outcome):
            statuses = np.where(item.statuses == GRANTED, DONE, item.statuses).astype(np.uint8)
            statuses[np.array(self._expired, dtype=np.int64) - asked.first_position] = EXPIRED
            yield _outcome(statuses)
            return
        leases, lease_id = self._cache.leases, item.lease.lease_id
        try:
            for position, row in zip(item.positions.tolist(), item.rows.tolist(), strict=True):
                for unit in asked.units.tolist():
                    pieces = self._pieces(position, row, unit)
                    # The client's reading sets the pace: keep the lease while it reads. Asked
                    # before each piece is read: without the lease its place may be another's.
                    while leases.renew(self._session, lease_id, asked.lease_s):
                        response = next(pieces, None)
                        if response is None:
                            break
                        yield response
                    else:
                        self._expired.append(position)
                        break
        finally:
            leases.release(self._session, lease_id)

    def _pieces(self, position: int, row: int, unit: int) -> Generator[cache_pb2.GetResponse]:
        table = self._cache.table
        unit_row = int(table.unit_base[row]) + unit
        length = int(table.units.length[unit_row])
        place = int(table.units.memory_offset[unit_row])
        self._cache.counters.add("get_bytes", length)
        view = self._cache.memory.arena.view(place, length)
        for begin in range(0, length, INLINE_PIECE_BYTES):
            end = min(begin + INLINE_PIECE_BYTES, length)
            data = cache_pb2.InlineData(
                position=position,
                unit=unit,
                variant=int(table.variant[row]),
                length=length,
                offset=begin,
                data=bytes(view[begin:end]),
                last=end == length,
            )
            if data.last:
                data.digest = int(table.units.digest[unit_row])
            yield cache_pb2.GetResponse(data=data)


def _grants(
    cache: PageCache, asked: GetPages, item: Grant, lengths: NDArray[np.uint32]
) -> cache_pb2.GrantBatch:
    """What grants tell of units of these ``lengths`` wherever they are to be had. Counts them."""
    cache.counters.add("get_bytes", int(lengths.sum()))
    variants = np.repeat(cache.table.variant[item.rows], len(asked.units))
    return cache_pb2.GrantBatch(
        lease_id=item.lease.lease_id,
        lease_ms=int(asked.lease_s * 1000),
        positions=columns.write(np.repeat(item.positions, len(asked.units)), columns.U32),
        units=columns.write(np.tile(asked.units, len(item.rows)), columns.U8),
        lengths=columns.write(lengths, columns.U32),
        variants=columns.write(variants, columns.U16),
    )


def _outcome(statuses: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> cache_pb2.GetResponse:
    return cache_pb2.GetResponse(
        outcome=cache_pb2.GetOutcome(statuses=columns.write(statuses, columns.U8))
    )
