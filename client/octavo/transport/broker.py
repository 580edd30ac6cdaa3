"""The node's descriptor broker: a ticket goes in, descriptors of its memory come out.

The connection stays open for as long as the session lives. The node hangs up when it dies or
withdraws the memory; the session's staging ring is freed when we do.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from octavo.errors import ConnectError
from octavo.transport.mapping import SharedMappings
from octavo_proto.limits import SEGMENTS_MAX
from octavo_proto.v1 import cache_pb2

MAGIC: Final = 0x4F435431
HEADER: Final = struct.Struct("<IIQQQ")
"""Magic, segment count, bytes of a segment, bytes of the ring, reserved."""

DESCRIPTORS_PER_MESSAGE: Final = 64


@dataclass(frozen=True, slots=True)
class BrokerHeader:
    segment_count: int
    segment_bytes: int
    ring_bytes: int


def parse_header(data: bytes) -> BrokerHeader:
    """The broker's first 32 bytes.

    Raises:
        ConnectError: not what a broker says.
    """
    magic, segment_count, segment_bytes, ring_bytes, _reserved = HEADER.unpack(data)
    if magic != MAGIC:
        raise ConnectError(f"the broker answered with magic {magic:#x}, expected {MAGIC:#x}")
    if not 0 < segment_count <= SEGMENTS_MAX or segment_bytes == 0 or ring_bytes == 0:
        raise ConnectError(
            f"the broker announces {segment_count} segments of {segment_bytes} bytes "
            f"and a ring of {ring_bytes}"
        )
    return BrokerHeader(segment_count, segment_bytes, ring_bytes)


class BrokerLink:
    """An open connection to the broker and what it gave."""

    def __init__(self, shared: cache_pb2.SharedMemory, timeout_s: float) -> None:
        """Connects, shows the ticket and maps the memory.

        Raises:
            ConnectError: no broker, a spent ticket, or memory that cannot be mapped.
        """
        self._closing = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        descriptors: list[int] = []
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(shared.broker_path)
            self._socket.sendall(shared.ticket)
            header = self._receive(descriptors)
            *segment_fds, ring_fd = descriptors
            self.mappings: Final = SharedMappings(header.segment_bytes, segment_fds, ring_fd)
            if self.mappings.ring_bytes < header.ring_bytes:
                self.mappings.close()
                raise ConnectError("the staging ring is shorter than announced")
            self._socket.settimeout(None)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise ConnectError(f"broker at {shared.broker_path}: {error}") from error
        except BaseException:
            self._socket.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def watch(self, on_hangup: Callable[[], None]) -> None:
        """Calls ``on_hangup`` from a thread of its own, once, when the node hangs up."""
        threading.Thread(
            target=self._wait_for_hangup, args=(on_hangup,), name="octavo-broker", daemon=True
        ).start()

    def close(self) -> None:
        """Hangs up. The memory is unmapped as soon as no copy uses it."""
        self._closing.set()
        self.mappings.close()
        with suppress(OSError):  # the node was quicker
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the watching thread
        self._socket.close()

    def leave_to_parent(self) -> None:
        """In a forked child: as ``close``, but the connection stays open for the parent."""
        self.mappings.unmap_after_fork()
        self._socket.close()

    def _receive(self, descriptors: list[int]) -> BrokerHeader:
        data = bytearray()
        while len(data) < HEADER.size:
            piece = self._receive_piece(HEADER.size - len(data), descriptors)
            if not piece:
                raise ConnectError("the broker refused the ticket")
            data += piece
        header = parse_header(bytes(data))
        while len(descriptors) < header.segment_count + 1:
            if not self._receive_piece(1, descriptors):
                raise ConnectError("the broker hung up between descriptors")
        if len(descriptors) > header.segment_count + 1:
            raise ConnectError("the broker sent more descriptors than it announced")
        return header

    def _receive_piece(self, size_bytes: int, descriptors: list[int]) -> bytes:
        piece, received, flags, _sender = socket.recv_fds(
            self._socket, size_bytes, DESCRIPTORS_PER_MESSAGE, socket.MSG_CMSG_CLOEXEC
        )
        descriptors.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise ConnectError("descriptors were lost: too many open files in this process?")
        return piece

    def _wait_for_hangup(self, on_hangup: Callable[[], None]) -> None:
        try:
            while self._socket.recv(64):
                pass  # a newer broker may say something; this client has nothing to hear
        except OSError:
            pass  # a broken connection is a hang-up too
        if not self._closing.is_set():
            self.mappings.close()
            on_hangup()
