"""One bulk stream's socket: connecting with a ticket, sending and receiving under a deadline.

The socket blocks in the kernel, one tick at a time. Any thread may call ``hang_up``, which wakes
the one that uses the socket; only that one closes it.

To put TLS under the streams, put it here and in the node's ``channel``: nothing else touches the
bytes on the wire.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from octavo.errors import ConnectError, NodeTimeout
from octavo_proto import bulk
from octavo_proto.limits import KEY_BYTES

TICK_S: Final = 0.1
"""How soon a transfer notices that it is not wanted any more, at the latest."""

_TICK: Final = struct.pack("ll", 0, int(TICK_S * 1e6))
_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class BulkSocket:
    """A stream that the node has admitted. Used by one thread at a time."""

    def __init__(self, host: str, port: int, ticket: bytes, timeout_s: float) -> None:
        """Connects and shows the ticket.

        Raises:
            ConnectError: nobody listens there, or the ticket is not accepted.
        """
        if len(ticket) != KEY_BYTES:
            raise ConnectError(f"a bulk ticket has {len(ticket)} bytes, expected {KEY_BYTES}")
        until_s = time.monotonic() + timeout_s
        where = f"bulk port {host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise ConnectError(f"{where}: {error}") from None
        try:
            self._socket.setblocking(True)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
            for level, option, value in _OPTIONS:
                self._socket.setsockopt(level, option, value)
            self.send([memoryview(bulk.HELLO.pack(bulk.MAGIC, bulk.VERSION, ticket))], until_s)
            magic, version = bulk.WELCOME.unpack(self.read(bulk.WELCOME.size, until_s))
            if (magic, version) != (bulk.MAGIC, bulk.VERSION):
                raise ConnectError(f"answered with magic {magic:#x}, version {version}")
        except (OSError, NodeTimeout, ConnectError) as error:
            self._socket.close()
            raise ConnectError(f"{where}: {error}") from None

    def send(
        self,
        buffers: Sequence[memoryview],
        until_s: float,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Sends all of ``buffers``, by ``until_s`` on the monotonic clock and while ``wanted``.

        Raises:
            NodeTimeout: that was not possible in time.
            ConnectError: the stream ended, or is not wanted any more.
        """
        left = list(buffers)
        while left:
            try:
                sent = self._socket.sendmsg(left[: bulk.ROWS_MAX])
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectError(f"the stream broke: {error}") from None
            while left and sent >= len(left[0]):
                sent -= len(left[0])
                del left[0]
            if left:
                left[0] = left[0][sent:]
                _require(until_s, wanted)

    def receive(
        self, view: memoryview, until_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Fills ``view``. Raises as ``send``."""
        done = 0
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                _require(until_s, wanted)
                continue
            except OSError as error:
                raise ConnectError(f"the stream broke: {error}") from None
            if count == 0:
                raise ConnectError("the node hung up")
            done += count
            if done < len(view):
                _require(until_s, wanted)

    def read(
        self, size_bytes: int, until_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> bytes:
        """Exactly so many bytes. Raises as ``send``."""
        data = bytearray(size_bytes)
        self.receive(memoryview(data), until_s, wanted)
        return bytes(data)

    def hang_up(self) -> None:
        """Ends the stream. Whoever is waiting on it wakes up."""
        with suppress(OSError):  # the node was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the descriptor back; nobody may be using it. In a forked child, the parent's
        stream stays as it is."""
        self._socket.close()


def _require(until_s: float, wanted: Callable[[], bool]) -> None:
    if time.monotonic() >= until_s:
        raise NodeTimeout("the deadline passed on a bulk stream")
    if not wanted():
        raise ConnectError("the call ended before its transfer")
