"""A put over a stream: unit bytes come in straight to their reserved places."""

from __future__ import annotations

import socket
from typing import Final

import numpy as np

from octavo_proto.bulk import (
    PART_BYTES,
    UNIT_ROW_BYTES,
    Answer,
    FrameError,
    Request,
    UnitsSent,
    read_units,
)
from octavo_proto.keys import unit_digest
from octavo_server.bulk.channel import Channel
from octavo_server.cache.arriving import ArrivingUnits
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import DONE, EXPIRED

SCRATCH_BYTES: Final = 256 << 10
"""Bytes that belong nowhere are read into this much memory and forgotten."""


class Receiving:
    """Bytes of one request on their way in; a unit whose target is None is read and dropped."""

    def __init__(self, sent: UnitsSent, arriving: ArrivingUnits | None) -> None:
        self.size_bytes = int(sent.lengths.sum())
        self.whole = np.zeros(0 if arriving is None else len(arriving.begun), dtype=np.bool_)
        """Of the units that arrive: whether their bytes are those whose digest was sent."""
        self._arriving = arriving
        self._lengths: list[int] = sent.lengths.tolist()
        self._digests: list[int] = sent.digests.tolist()
        self._begun = (
            {} if arriving is None else {int(row): i for i, row in enumerate(arriving.begun)}
        )
        self._row = 0
        self._received = 0
        self._scratch = bytearray()

    def step(self, connection: socket.socket) -> bool:
        """See ``Moving``."""
        while self._row < len(self._lengths):
            length = self._lengths[self._row]
            while self._received < length:
                view = self._view(length - self._received)
                try:
                    count = connection.recv_into(view, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    return False
                if count == 0:
                    raise ConnectionError("the peer hung up")
                self._received += count
                if count < len(view):  # a tick passed in the middle of it
                    return False
            self._check()
            self._row, self._received = self._row + 1, 0
        return True

    def _view(self, left_bytes: int) -> memoryview:
        place = self._begun.get(self._row)
        if place is None or self._arriving is None:
            self._scratch = self._scratch or bytearray(SCRATCH_BYTES)
            return memoryview(self._scratch)[:left_bytes]
        return self._arriving.targets[place][self._received :]

    def _check(self) -> None:
        place = self._begun.get(self._row)
        if place is not None and self._arriving is not None:
            # Of what lies in the place, where nobody else can write.
            found = unit_digest(self._arriving.targets[place], self._arriving.seeds[place])
            self.whole[place] = found == self._digests[self._row]


async def receive_units(
    cache: PageCache, session: Session, request: Request, channel: Channel
) -> int:
    """Answers a ``PUT``; the number of units whose bytes were not what their digests say.

    Units are visible, if their pages are complete, when the answer is sent.

    Raises:
        FrameError: more bytes than such a request may have.
    """
    sent = read_units(await channel.read(request.row_count * UNIT_ROW_BYTES), request.row_count)
    bytes_max = max(PART_BYTES, cache.memory.unit_bytes_max)
    if int(sent.lengths.sum()) > bytes_max:
        raise FrameError(f"{int(sent.lengths.sum())} bytes in one request, at most {bytes_max}")
    reservation = cache.reservations.find(session, request.name)
    if reservation is None:
        # They are on their way already: only the bytes behind them make sense again.
        await channel.move_in(Receiving(sent, None))
        statuses = np.full(request.row_count, EXPIRED, dtype=np.uint8)
        await channel.write(_answer(request, statuses))
        return 0
    cache.reservations.renew(session, request.name, cache.limits.reservation_s)
    arriving = ArrivingUnits(cache, reservation, sent, channel.hang_up)
    try:
        receiving = Receiving(sent, arriving)
        await channel.move_in(receiving)
    except BaseException:
        arriving.abandon()
        raise
    arriving.publish(receiving.whole)
    cache.counters.add("bulk_received_bytes", receiving.size_bytes)
    await channel.write(_answer(request, arriving.statuses))
    return int(np.count_nonzero(~receiving.whole))


def _answer(request: Request, statuses: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    return Answer(request.kind, DONE, request.row_count, 0).pack() + statuses.tobytes()
