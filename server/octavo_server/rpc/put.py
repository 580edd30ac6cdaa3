"""Put: a client's stream of unit bytes into reserved places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from octavo_proto import columns
from octavo_proto.limits import UNITS_MAX
from octavo_proto.v1 import cache_pb2
from octavo_server.cache.filling import InlineFill
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.statuses import EXPIRED, REJECTED
from octavo_server.errors import RequestError
from octavo_server.rpc.sessions import Sessions

STALL_CHECK_S: Final = 0.5
"""While a client sends nothing, this often the put looks whether its reservation still holds: a
stopped client must not keep the place that it was filling."""

REFUSED_ROWS_MAX: Final = 65_536
"""Units without a place that one put may name before it is refused as a whole."""


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
        async for request in _while_held(requests, reservation, receiver):
            if request.WhichOneof("part") != "data":
                raise RequestError("a put has one header, then data only")
            receiver.append(request.data)
        receiver.end()
    finally:
        receiver.close()
    if header.last and reservation is not None:
        cache.reservations.finish(reservation)
    return receiver.response()


async def _while_held(
    requests: AsyncIterator[cache_pb2.PutRequest],
    reservation: Reservation | None,
    receiver: _Receiver,
) -> AsyncIterator[cache_pb2.PutRequest]:
    """The stream; between its messages a unit under way is given up if its reservation ends."""
    while True:
        message = asyncio.ensure_future(anext(requests, None))
        try:
            while reservation is not None and not message.done():
                await asyncio.wait({message}, timeout=STALL_CHECK_S)
                if reservation.ended:
                    receiver.expire()
            request = await message
        finally:
            message.cancel()  # the put itself was cancelled; harmless when the message is here
        if request is None:
            return
        yield request


class _Receiver:
    """Units of one put in the order in which they come."""

    def __init__(self, cache: PageCache, reservation: Reservation | None) -> None:
        self._cache = cache
        self._reservation = reservation
        self._current: tuple[int, int] | None = None
        self._fill: InlineFill | None = None
        self._expected = 0
        self._length: int | None = None  # of the current unit, where that is known
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
        if self._length is not None and self._expected > self._length:
            raise RequestError(
                f"page {data.position}, unit {data.unit}: more than the {self._length} bytes "
                "that were reserved"
            )
        if self._fill is None:
            return
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

    def expire(self) -> None:
        """The reservation is gone: the unit under way is given up, and says so."""
        if self._fill is not None:
            assert self._current is not None
            self.close()
            self._rows.append((*self._current, EXPIRED))

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
        self._current, self._expected, self._length = (position, unit), 0, None
        if unit >= UNITS_MAX:
            raise RequestError(f"page {position}: unit {unit}, no page has more than {UNITS_MAX}")
        if self._reservation is not None:
            self._fill = self._cache.begin_fill(self._reservation, position, unit)
        if self._fill is not None:
            self._length = self._fill.length
            return
        if len(self._rows) >= REFUSED_ROWS_MAX:
            raise RequestError(f"more than {REFUSED_ROWS_MAX} units, none of them reserved")
        expired = self._reservation is None or self._reservation.ended
        self._rows.append((position, unit, EXPIRED if expired else REJECTED))
