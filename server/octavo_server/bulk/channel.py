"""A stream's socket: the event loop reads and writes headers, threads move unit bytes.

The socket blocks, with a kernel timeout of one tick: a thread that gets no further within a tick
gives the work back to the loop, which waits for the socket, so a peer that is slow or stopped
costs the node no thread. Nobody closes the socket while a thread may be in it: whoever wants a
stream to end calls ``hang_up``, at which both sides of every wait return.

To put TLS under the streams, put it here and in the client's ``bulk_socket``: nothing else
touches the bytes on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from octavo_server.store.io_pool import Call, Lane

TICK_S: Final = 0.05
"""How long a thread stays with a socket that does not move."""

STALL_S: Final = 10.0
"""A transfer that does not move for this long is over, and its stream with it."""

RATE_MIN: Final = 256 << 10
"""Bytes a second that a transfer must make on the whole, beyond ``STALL_S``: a peer that trickles
pins memory no longer than that."""

_TICK: Final = struct.pack("ll", 0, int(TICK_S * 1e6))
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # A peer whose host vanished is noticed within a minute also when nothing is under way.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Moving(Protocol):
    """A transfer of unit bytes that goes step by step."""

    @property
    def size_bytes(self) -> int:
        """All of it."""
        ...

    def step(self, connection: socket.socket) -> bool:
        """Moves bytes until all are there (True) or the socket did not take or give any for a
        tick (False). Runs in a thread and releases the GIL.

        Raises:
            OSError: the connection broke.
        """
        ...


class Channel:
    """One stream of a worker. Used on the event loop."""

    def __init__(self, connection: socket.socket, lane: Lane) -> None:
        self._connection: Final = connection
        self._lane: Final = lane
        self._loop: Final = asyncio.get_running_loop()
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
        for level, option, value in _KEEPALIVE:
            connection.setsockopt(level, option, value)

    async def read(self, size_bytes: int, *, first_byte_s: float | None = STALL_S) -> bytes:
        """Exactly so many bytes. ``first_byte_s`` bounds the wait for the first of them (None:
        for ever), ``STALL_S`` that for all others together.

        Raises:
            ConnectionError: the peer hung up; TimeoutError: it went silent.
        """
        received = bytearray()
        until_s = None if first_byte_s is None else self._loop.time() + first_byte_s
        while len(received) < size_bytes:
            try:
                part = self._connection.recv(size_bytes - len(received), socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._readable(until_s)
                continue
            if not part:
                raise ConnectionError("the peer hung up")
            if not received:
                until_s = self._loop.time() + STALL_S
            received += part
        return bytes(received)

    async def write(self, data: bytes) -> None:
        """All of a short message, within ``STALL_S``. Raises as ``read``."""
        until_s = self._loop.time() + STALL_S
        while data:
            try:
                sent = self._connection.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._writable(until_s)
                continue
            data = data[sent:]

    async def move_out(self, transfer: Moving) -> None:
        """Sends a transfer's bytes. Raises as ``read``, OSError also where the pool closes."""
        await self._move(transfer, self._writable)

    async def move_in(self, transfer: Moving) -> None:
        """Receives a transfer's bytes. Raises as ``move_out``."""
        await self._move(transfer, self._readable)

    def hang_up(self) -> None:
        """Ends the stream: whatever is being waited for on it fails soon."""
        with contextlib.suppress(OSError):  # the peer was quicker
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the descriptor back. Nothing may be under way."""
        self._connection.close()

    async def _move(
        self, transfer: Moving, ready: Callable[[float | None], Awaitable[None]]
    ) -> None:
        until_s = self._loop.time() + STALL_S + transfer.size_bytes / RATE_MIN
        while not await self._in_thread(lambda: transfer.step(self._connection)):
            now_s = self._loop.time()
            if now_s >= until_s:
                raise TimeoutError("the peer is too slow")
            await ready(min(now_s + STALL_S, until_s))

    async def _in_thread(self, step: Callable[[], bool]) -> bool:
        """Sees a step to its end, also when this task is cancelled: it may be using memory that
        only the caller keeps in place."""
        future: asyncio.Future[bool] = self._loop.create_future()
        self._lane.submit([Call(step, future)])
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.hang_up()
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()  # nobody else will look at it
            raise

    async def _readable(self, until_s: float | None) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(self._connection, ready.set)
        try:
            async with asyncio.timeout_at(until_s):
                await ready.wait()
        finally:
            self._loop.remove_reader(self._connection)

    async def _writable(self, until_s: float | None) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._connection, ready.set)
        try:
            async with asyncio.timeout_at(until_s):
                await ready.wait()
        finally:
            self._loop.remove_writer(self._connection)


def views_after(views: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of ``views`` once their first ``done_bytes`` bytes have moved."""
    for index, view in enumerate(views):
        if done_bytes < len(view):
            return [view[done_bytes:], *views[index + 1 :]]
        done_bytes -= len(view)
    return []
