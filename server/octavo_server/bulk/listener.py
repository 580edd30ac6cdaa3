"""The node's bulk port: tickets in, streams out."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from octavo_proto import bulk
from octavo_proto.limits import BULK_STREAMS_MAX
from octavo_server.accepting import accepted
from octavo_server.addresses import HostPort
from octavo_server.bulk.channel import Channel
from octavo_server.bulk.receiving import receive_units
from octavo_server.bulk.sending import send_leased
from octavo_server.bulk.tickets import BulkPort, Tickets
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.session import Session

_log = logging.getLogger(__name__)

TICKET_WAIT_S: Final = 5.0
"""A stranger that shows no ticket for this long is hung up on."""

STRANGERS_MAX: Final = 64
"""Connections that have not shown a ticket yet."""

THREADS: Final = 8
"""Streams that move bytes at the same moment; a stream that waits for its peer takes none."""


class BulkListener:
    """Serves unit bytes to whoever shows a ticket."""

    def __init__(
        self,
        address: HostPort,
        cache: PageCache,
        tickets: Tickets,
        on_use: Callable[[Session], None],
    ) -> None:
        """Binds at once, so that the port is known. ``on_use`` is called with the session of
        each request.

        Raises:
            OSError: the address can't be had.
        """
        self._cache: Final = cache
        self._tickets: Final = tickets
        self._on_use: Final = on_use
        self._lane: Final = cache.io.lane("bulk", THREADS)
        self._listener: Final = _bound(address)
        wildcard = address.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
        self.port: Final = BulkPort(
            "" if wildcard else address.host, int(self._listener.getsockname()[1]), tickets
        )
        self._streams: dict[Session, set[Channel]] = {}
        self._serving: dict[asyncio.Task[None], Channel] = {}
        self._strangers = 0
        self.transfer_count = 0
        """Requests under way."""

    @property
    def stream_count(self) -> int:
        """Open streams of all sessions."""
        return sum(map(len, self._streams.values()))

    async def run(self) -> None:
        """Accepts streams until cancelled. Its end is a fault of the node."""
        loop = asyncio.get_running_loop()
        async for connection in accepted(self._listener, "a bulk stream"):
            if self._strangers >= STRANGERS_MAX:
                connection.close()
                self._cache.counters.add("bulk_streams_refused")
                continue
            self._strangers += 1
            channel = Channel(connection, self._lane)
            task = loop.create_task(self._serve(channel))
            self._serving[task] = channel
            task.add_done_callback(self._serving.pop)

    def hang_up(self, session: Session) -> None:
        """Ends a session's streams."""
        for channel in tuple(self._streams.get(session, ())):
            channel.hang_up()

    async def close(self) -> None:
        """Ends all streams; no thread uses the arena for them any more when it returns."""
        self._listener.close()
        for channel in self._serving.values():
            channel.hang_up()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, channel: Channel) -> None:
        session: Session | None = None
        try:
            try:
                session = await self._admit(channel)
            finally:
                self._strangers -= 1
            if session is not None:
                self._streams.setdefault(session, set()).add(channel)
                self._cache.counters.add("bulk_streams_opened")
                await channel.write(bulk.WELCOME.pack(bulk.MAGIC, bulk.VERSION))
                await self._answer_requests(session, channel)
        except TimeoutError:
            self._cache.counters.add("bulk_streams_stalled")
        except bulk.FrameError as error:
            self._cache.counters.add("bulk_requests_refused")
            _log.info("a bulk stream made no sense: %s", error)
        except OSError as error:
            _log.debug("a bulk stream ended: %s", error)
        finally:
            channel.hang_up()
            channel.close()
            if session is not None:
                self._forget(session, channel)

    async def _admit(self, channel: Channel) -> Session | None:
        """The session of whoever shows a ticket that is good. Others are counted."""
        session = None
        try:
            async with asyncio.timeout(TICKET_WAIT_S):
                hello = await channel.read(bulk.HELLO.size)
            magic, version, ticket = bulk.HELLO.unpack(hello)
            if (magic, version) == (bulk.MAGIC, bulk.VERSION):
                session = self._tickets.redeem(ticket)
            if session is not None and len(self._streams.get(session, ())) >= BULK_STREAMS_MAX:
                session = None
        except (TimeoutError, OSError) as error:
            _log.debug("a stranger at the bulk port showed no ticket: %s", error)
        if session is None:
            self._cache.counters.add("bulk_streams_refused")
        return session

    async def _answer_requests(self, session: Session, channel: Channel) -> None:
        counters = self._cache.counters
        while not session.closed:
            header = await channel.read(bulk.REQUEST_BYTES, first_byte_s=None)
            request = bulk.read_request(header)
            self._on_use(session)
            self.transfer_count += 1
            try:
                if request.kind == bulk.PUT:
                    corrupt = await receive_units(self._cache, session, request, channel)
                    counters.add("bulk_units_corrupt", corrupt)
                elif not await send_leased(self._cache, session, request, channel):
                    counters.add("bulk_requests_refused")
            finally:
                self.transfer_count -= 1

    def _forget(self, session: Session, channel: Channel) -> None:
        channels = self._streams.get(session)
        if channels is not None:
            channels.discard(channel)
            if not channels:
                del self._streams[session]


def _bound(address: HostPort) -> socket.socket:
    family, kind, _, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(STRANGERS_MAX)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
