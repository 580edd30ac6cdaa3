"""Hands descriptors of shared memory to workers.

A worker connects to a Unix socket, shows the ticket of its session, and gets the arena's
segments (which it can only map for reading) and its staging ring. The connection lasts as long
as the session: when the worker dies, its session ends within moments; when the node dies, the
worker sees the hang-up and lets go of the mapping.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from pathlib import Path
from typing import Final

from octavo_proto.limits import KEY_BYTES
from octavo_server.accepting import accepted
from octavo_server.rpc.sessions import Sessions
from octavo_server.store.arena import Arena

_log = logging.getLogger(__name__)

HEADER: Final = struct.Struct("<IIQQQ")
"""Magic, segment count, bytes a segment, bytes of the ring, reserved."""

MAGIC: Final = 0x4F435431
DESCRIPTORS_PER_MESSAGE: Final = 64
TICKET_WAIT_S: Final = 5.0
CONNECTIONS_WAITING_MAX: Final = 64


class Broker:
    """Serves one node's descriptors at one path."""

    def __init__(self, path: Path, arena: Arena, sessions: Sessions) -> None:
        self.path: Final = path
        self._arena: Final = arena
        self._sessions: Final = sessions
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._waiting = 0

    def listen(self) -> None:
        """Binds the socket, for this user only. A leftover of a dead node is replaced."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(str(self.path))
        self.path.chmod(0o600)
        listener.listen(CONNECTIONS_WAITING_MAX)
        listener.setblocking(False)
        self._listener = listener

    async def run(self) -> None:
        """Accepts workers until cancelled. Its end is a fault of the node."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        async for connection in accepted(self._listener, "a worker"):
            connection.setblocking(False)
            if self._waiting >= CONNECTIONS_WAITING_MAX:
                connection.close()
                continue
            task = loop.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        """Hangs up on every worker."""
        if self._listener is not None:
            self._listener.close()
            self.path.unlink(missing_ok=True)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        session = None
        try:
            self._waiting += 1
            try:
                async with asyncio.timeout(TICKET_WAIT_S):
                    ticket = await _receive(connection, KEY_BYTES)
            finally:
                self._waiting -= 1
            attached = self._sessions.attach(ticket, lambda: _hang_up(connection))
            if attached is None:
                return
            session, ring = attached
            self._send_descriptors(connection, ring.fd, ring.size_bytes)
            while await loop.sock_recv(connection, 64):  # nothing is expected; b"" is the end
                pass
        except (TimeoutError, ConnectionError, OSError) as error:
            _log.info("a worker's broker connection ended: %s", error or type(error).__name__)
        finally:
            connection.close()
            if session is not None:
                self._sessions.close(session.session_id)

    def _send_descriptors(self, connection: socket.socket, ring_fd: int, ring_bytes: int) -> None:
        descriptors = [segment.fd for segment in self._arena.segments]
        header = HEADER.pack(MAGIC, len(descriptors), self._arena.segment_bytes, ring_bytes, 0)
        descriptors.append(ring_fd)
        # A fresh connection's buffer takes these few bytes whole.
        for begin in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
            batch = descriptors[begin : begin + DESCRIPTORS_PER_MESSAGE]
            socket.send_fds(connection, [header if begin == 0 else b"+"], batch)


async def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        part = await asyncio.get_running_loop().sock_recv(connection, size_bytes - len(received))
        if not part:
            raise ConnectionError("it ended before a ticket was shown")
        received += part
    return received


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be gone already
        connection.shutdown(socket.SHUT_RDWR)


def broker_path(unix_socket: Path) -> Path:
    """Where the broker of a node listens, from where the node does."""
    return unix_socket.with_name(unix_socket.name + ".broker")
