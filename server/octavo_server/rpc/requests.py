"""What requests say, checked and turned into plain values of the cache."""

from __future__ import annotations

from typing import Any, Final, cast

import grpc
import numpy as np
from numpy.typing import NDArray

from octavo_proto import columns
from octavo_proto.v1 import cache_pb2
from octavo_server.cache.chains import ChainView, unit_indices
from octavo_server.cache.filling import FilledUnits
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.reserving import ReservePages
from octavo_server.cache.session import Session
from octavo_server.errors import RequestError
from octavo_server.rpc.wishes import retention_of

GET_WAIT_S_MAX: Final = 600.0
"""A get that names no deadline of its own ends after this."""

IDS_MAX: Final = 65_536
"""Ids in one column of a Release or Renew: no session can hold more of a kind, and each costs
the event loop about a microsecond."""


def reserve_pages(
    request: cache_pb2.ReserveRequest, session: Session, chain: ChainView, limit_s: float
) -> ReservePages:
    """Units that a Reserve asks for.

    Raises:
        RequestError, ColumnError: its columns contradict the chain, the layout or the session.
    """
    units = unit_indices(request.unit_mask, chain.layout)
    positions = _positions(request, len(chain))
    pages = len(positions)
    lengths = columns.read("unit_lengths", request.unit_lengths, columns.U32)
    if len(lengths) == 1:
        lengths = np.broadcast_to(lengths, (pages, len(units)))
    elif len(lengths) == pages * len(units):
        lengths = lengths.reshape(pages, len(units))
    elif len(lengths) == pages:
        lengths = np.broadcast_to(lengths[:, None], (pages, len(units)))
    else:
        raise RequestError(
            f"unit_lengths has {len(lengths)} rows; for {pages} pages of {len(units)} wanted units "
            f"it must have 1, {pages} or {pages * len(units)}"
        )
    if lengths.size and not lengths.all():
        raise RequestError("unit_lengths: a unit of 0 bytes")
    variants = columns.read("variants", request.variants, columns.U16)
    if len(variants) not in (1, pages):
        raise RequestError(f"variants has {len(variants)} rows, must have 1 or {pages}")
    if len(variants) and not variants.all():
        raise RequestError("variants: 0 is no variant")
    variants = np.array(np.broadcast_to(variants, (pages,)))
    _check_writable(session, variants)
    return ReservePages(
        chain=chain,
        positions=positions,
        units=units,
        lengths=lengths,
        variants=variants,
        duration_s=duration(request.reservation_ms, limit_s),
        wish=retention_of(request),
    )


def filled_units(
    request: cache_pb2.CommitRequest, reservation: Reservation, ring_bytes: int
) -> FilledUnits:
    """Units that a Commit hands over.

    Raises:
        RequestError, ColumnError: its columns differ in rows, there are more rows than reserved
            units could be, or an offset is beyond the ring.
    """
    positions = columns.read("positions", request.positions, columns.U32)
    count = len(positions)
    units = columns.read("units", request.units, columns.U8, count)
    offsets = columns.read("ring_offsets", request.ring_offsets, columns.U64, count)
    lengths = columns.read("lengths", request.lengths, columns.U32, count)
    rows_max = len(reservation.rows) * reservation.layout.layout.unit_count
    if count > rows_max:
        raise RequestError(f"positions has {count} rows; the reserved chain has {rows_max} units")
    # Before they become signed: 2^64-1 would turn into -1, just before the ring.
    if count and int(offsets.max()) > ring_bytes:
        row = int(np.argmax(offsets))
        raise RequestError(
            f"ring_offsets: row {row} is {int(offsets[row])}; the ring has {ring_bytes} bytes"
        )
    return FilledUnits(
        positions=positions.astype(np.int64),
        units=units.astype(np.int64),
        ring_offsets=offsets.astype(np.int64),
        lengths=lengths.astype(np.int64),
    )


def ids(name: str, data: bytes) -> list[int]:
    """A column of u64 ids.

    Raises:
        RequestError, ColumnError: it has more than IDS_MAX rows, or no whole number of them.
    """
    found: list[int] = columns.read(name, data, columns.U64).tolist()
    if len(found) > IDS_MAX:
        raise RequestError(f"{name} has {len(found)} rows, at most {IDS_MAX} allowed")
    return found


def duration(asked_ms: int, limit_s: float) -> float:
    """Seconds that a lease, hold or reservation may last; 0 asks for the limit."""
    return min(asked_ms / 1000, limit_s) if asked_ms else limit_s


def wait_s(request: cache_pb2.GetRequest, context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Seconds until a get stops waiting: a little before its call's deadline, so that the
    outcome still arrives."""
    remaining = cast("float | None", context.time_remaining())  # the stubs forget about None
    left_s = (
        GET_WAIT_S_MAX if remaining is None else max(0.0, min(remaining, GET_WAIT_S_MAX) * 0.95)
    )
    return min(left_s, request.wait_ms / 1000) if request.wait_ms else left_s


def _positions(request: cache_pb2.ReserveRequest, chain_pages: int) -> NDArray[np.int64]:
    """Those pages of the chain that the session puts."""
    if not request.positions:
        return np.arange(chain_pages, dtype=np.int64)
    positions = columns.read("positions", request.positions, columns.U32).astype(np.int64)
    if (np.diff(positions) <= 0).any():
        raise RequestError("positions must ascend, each once")
    if positions[-1] >= chain_pages:
        raise RequestError(f"positions names page {positions[-1]}, the chain has {chain_pages}")
    return positions


def _check_writable(session: Session, variants: NDArray[np.uint16]) -> None:
    readable = session.can_read(variants)
    if not readable.all():
        variant = int(variants[int(np.argmin(readable))])
        raise RequestError(f"variants: {variant} is none that this session said it can read")
