"""A get over a stream: leased units go out of the arena as they lie there."""

from __future__ import annotations

import socket
from typing import Final

from octavo_proto.bulk import Answer, Request
from octavo_server.bulk.channel import Channel, views_after
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import DONE, EXPIRED, REJECTED

VECTORS_MAX: Final = 1024
"""Pieces of memory that the kernel takes at a time."""


class Sending:
    """Bytes of one request on their way out."""

    def __init__(self, views: list[memoryview]) -> None:
        self.size_bytes = sum(map(len, views))
        self._views = views

    def step(self, connection: socket.socket) -> bool:
        """See ``Moving``."""
        while self._views:
            try:
                sent = connection.sendmsg(self._views[:VECTORS_MAX])
            except BlockingIOError:
                return False
            offered = sum(map(len, self._views[:VECTORS_MAX]))
            self._views = views_after(self._views, sent)
            if sent < offered:  # a tick passed in the middle of it
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
    places, lengths = units.places[chosen].tolist(), units.lengths[chosen].tolist()
    arena, pages = cache.memory.arena, units.pages[chosen]
    size_bytes = sum(lengths)
    answer = Answer(request.kind, DONE, request.row_count, size_bytes).pack()
    cache.pins.pin(pages)
    try:
        # The answer goes with the bytes: a write of its own would cost the event loop more than
        # all the rest of a request, since it waits for the GIL behind the threads that send.
        views = [memoryview(answer), *map(arena.view, places, lengths)]
        await channel.move_out(Sending(views))
        cache.counters.add("bulk_sent_bytes", size_bytes)
    finally:
        cache.pins.unpin(pages)
    return True
