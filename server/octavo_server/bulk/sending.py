"""A get over a stream: leased units go out of the arena as they lie there."""

from __future__ import annotations

import socket

import numpy as np

from octavo_proto.bulk import Answer, Request
from octavo_server.bulk.channel import Channel, views_after
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import DONE, EXPIRED, REJECTED


class Sending:
    """Bytes of one request on their way out."""

    def __init__(self, views: list[memoryview]) -> None:
        self.size_bytes = sum(map(len, views))
        self._views = views

    def step(self, connection: socket.socket) -> bool:
        """See ``Moving``."""
        while self._views:
            try:
                sent = connection.sendmsg(self._views)
            except BlockingIOError:
                return False
            left = views_after(self._views, sent)
            whole = not left
            self._views = left
            if not whole:  # a tick passed in the middle of it
                return False
        return True


async def send_leased(
    cache: PageCache, session: Session, request: Request, channel: Channel
) -> bool:
    """Answers a ``GET``; whether it was granted.

    The pages stay pinned until they are sent or the stream is over, whatever becomes of the lease
    meanwhile. Asking renews it: a session that reads steadily does not lose it.
    """
    lease = cache.leases.find(session, request.name)
    units = None if lease is None else lease.bulk_units
    end = request.first + request.row_count
    if lease is None or units is None or end > len(units.lengths):
        status = EXPIRED if lease is None else REJECTED
        await channel.write(Answer(request.kind, status, request.row_count, 0).pack())
        return False
    cache.leases.renew(session, lease.lease_id, cache.limits.lease_s)
    chosen = slice(request.first, end)
    arena, pages = cache.memory.arena, np.unique(units.pages[chosen])
    cache.pins.pin(pages)
    try:
        sending = Sending(
            [
                arena.view(place, length)
                for place, length in zip(
                    units.places[chosen].tolist(), units.lengths[chosen].tolist(), strict=True
                )
            ]
        )
        answer = Answer(request.kind, DONE, request.row_count, sending.size_bytes)
        await channel.write(answer.pack())
        await channel.move_out(sending)
        cache.counters.add("bulk_sent_bytes", sending.size_bytes)
    finally:
        cache.pins.unpin(pages)
    return True
