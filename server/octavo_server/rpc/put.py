"""Put: a client's stream of unit bytes into reserved places."""

from __future__ import annotations

from collections.abc import AsyncIterator

from octavo_proto import columns
from octavo_proto.v1 import cache_pb2
from octavo_server.cache.filling import InlineFill
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.statuses import EXPIRED, REJECTED
from octavo_server.errors import RequestError
from octavo_server.rpc.sessions import Sessions


async def receive_units(
    cache: PageCache, sessions: Sessions, requests: AsyncIterator[cache_pb2.PutRequest]
) -> cache_pb2.PutResponse:
    """Fills units piece by piece and makes each visible when it is whole.

    Raises:
        RequestError: the stream is malformed. Units that were whole before stay stored.
    """
    first = await anext(requests, None)
    if first is None or first.WhichOneof("part") != "header":
        raise RequestError("the first message of a put must be its header")
    header = first.header
    session = sessions.find(header.session_id)
    reservation = cache.reservations.find(session, header.reservation_id)
    receiver = _Receiver(cache, reservation)
    try:
        async for request in requests:
            if request.WhichOneof("part") != "data":
                raise RequestError("a put has one header, then data only")
            receiver.append(request.data)
        receiver.end()
    finally:
        receiver.close()
    if header.last and reservation is not None:
        cache.reservations.end(reservation)
    return receiver.response()


class _Receiver:
    """Units of one put in the order in which they come."""

    def __init__(self, cache: PageCache, reservation: Reservation | None) -> None:
        self._cache = cache
        self._reservation = reservation
        self._current: tuple[int, int] | None = None
        self._fill: InlineFill | None = None
        self._expected = 0
        self._rows: list[tuple[int, int, int]] = []

    def append(self, data: cache_pb2.PutData) -> None:
        """The next piece of the stream."""
        unit = (data.position, data.unit)
        if unit != self._current:
            self.end()
            self._begin(*unit)
        if data.offset != self._expected:
            raise RequestError(
                f"page {data.position}, unit {data.unit}: a piece at offset {data.offset}, "
                f"expected {self._expected}"
            )
        self._expected += len(data.data)
        if self._fill is None:
            return
        if self._expected > self._fill.length:
            raise RequestError(
                f"page {data.position}, unit {data.unit}: more than the {self._fill.length} bytes "
                "that were reserved"
            )
        self._fill.append(data.data)
        if self._fill.filled == self._fill.length:
            status = self._fill.commit()
            self._fill = None
            self._rows.append((*unit, status))

    def end(self) -> None:
        """The current unit has no more pieces. Raises RequestError where some are missing."""
        if self._fill is not None:
            assert self._current is not None
            position, unit = self._current
            raise RequestError(
                f"page {position}, unit {unit}: {self._fill.filled} of {self._fill.length} bytes"
            )

    def close(self) -> None:
        """Gives up a unit that was not completed."""
        if self._fill is not None:
            self._fill.abandon()
            self._fill = None

    def response(self) -> cache_pb2.PutResponse:
        """A row a unit."""
        return cache_pb2.PutResponse(
            positions=columns.write([row[0] for row in self._rows], columns.U32),
            units=columns.write([row[1] for row in self._rows], columns.U8),
            statuses=columns.write([row[2] for row in self._rows], columns.U8),
        )

    def _begin(self, position: int, unit: int) -> None:
        self._current, self._expected, self._fill = (position, unit), 0, None
        if self._reservation is None:
            self._rows.append((position, unit, EXPIRED))
            return
        self._fill = self._cache.begin_fill(self._reservation, position, unit)
        if self._fill is None:
            status = EXPIRED if self._reservation.ended else REJECTED
            self._rows.append((position, unit, status))
