"""Plain blocking sockets between two processes: the ceiling of what crosses TCP on this machine.

``python -m octavo.bench.plain_sockets SIZE_BYTES`` is the other process. It serves connections on
a port that it prints, a thread each. An order is a byte and a length: ``G`` sends so many bytes,
``P`` takes so many and says so with a byte. Nothing is checked and nothing is named: ``sendmsg``
on one side, ``recv_into`` on the other, from and into memory that was touched before.
"""

from __future__ import annotations

import itertools
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

ORDER: Final = struct.Struct("<cQ")
PIECE_BYTES: Final = 4 << 20


class PlainPeer:
    """The other process, and ``stream_count`` connections to it. Leave the block to end both."""

    def __init__(self, size_bytes: int, stream_count: int) -> None:
        command = [sys.executable, "-m", "octavo.bench.plain_sockets", str(size_bytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(stream_count)]
        self._threads = ThreadPoolExecutor(stream_count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for stream in self._streams:
            stream.close()
        self._threads.shutdown()
        self._process.kill()
        self._process.communicate()

    def get(self, target: memoryview, piece_bytes: int) -> None:
        """Fills ``target`` in pieces, each stream its share."""
        pieces = itertools.repeat(piece_bytes)
        list(self._threads.map(_receive, self._streams, self._shares(target), pieces))

    def put(self, source: memoryview) -> None:
        """Sends ``source``, each stream its share, until the peer has all of it."""
        list(self._threads.map(_send, self._streams, self._shares(source)))

    def _shares(self, memory: memoryview) -> list[memoryview]:
        count = len(self._streams)
        edges = [len(memory) * place // count for place in range(count + 1)]
        return [memory[begin:end] for begin, end in itertools.pairwise(edges)]


def _receive(stream: socket.socket, share: memoryview, piece_bytes: int) -> None:
    stream.sendall(ORDER.pack(b"G", len(share)))
    for begin in range(0, len(share), piece_bytes):
        _fill(stream, share[begin : begin + piece_bytes])


def _send(stream: socket.socket, share: memoryview) -> None:
    stream.sendall(ORDER.pack(b"P", len(share)))
    _drain(stream, share)
    _fill(stream, memoryview(bytearray(1)))


def _fill(stream: socket.socket, view: memoryview) -> None:
    while len(view):
        count = stream.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other process hung up")
        view = view[count:]


def _drain(stream: socket.socket, view: memoryview) -> None:
    while len(view):
        view = view[stream.sendmsg([view[:PIECE_BYTES]]) :]


def _serve(stream: socket.socket, memory: memoryview) -> None:
    order = bytearray(ORDER.size)
    try:
        while True:
            _fill(stream, memoryview(order))
            kind, size_bytes = ORDER.unpack(order)
            if kind == b"G":
                _drain(stream, memory[:size_bytes])
            else:
                _fill(stream, memory[:size_bytes])
                stream.sendall(b"+")
    except ConnectionError:
        stream.close()


def main(size_bytes: int) -> None:
    """Serves until it is killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        stream, _ = listener.accept()
        memory = memoryview(bytearray(b"\x5a" * size_bytes))
        threading.Thread(target=_serve, args=(stream, memory), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
