"""A TCP proxy that spoils what passes through it: real sockets, one fault at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import Enum

CHUNK_BYTES = 64 << 10


class Kind(Enum):
    """What happens to a direction once ``after_bytes`` have passed."""

    CUT = "both sides are hung up on"
    STALL = "nothing passes any more"
    FLIP = "one bit is turned"
    DROP = "sixteen bytes are left out"
    INSERT = "sixteen bytes are put in"


@dataclass(slots=True)
class Fault:
    """Strikes ``times`` connections, the next ones first."""

    kind: Kind
    after_bytes: int
    times: int = 1_000_000

    def take(self) -> bool:
        """Whether it strikes another one."""
        self.times -= 1
        return self.times >= 0


class FaultyProxy(AbstractContextManager["FaultyProxy"]):
    """Passes connections on to a port of this host. Faults may be set at any time, and are about
    connections that are made from then on; ``delay_s`` is about every chunk."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.to_client: Fault | None = None
        self.to_node: Fault | None = None
        self.delay_s = 0.0
        self.connection_count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Nobody is served from now on."""
        self._ended.set()
        self.refuse()
        self.cut()

    def refuse(self) -> None:
        """Whoever is connected stays so; others are refused from now on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut(self) -> None:
        """Hangs up on whoever is connected."""
        for each in self._sockets:
            _hang_up(each)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
                node = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            self.connection_count += 1
            self._sockets += [client, node]
            for source, target, fault in (
                (client, node, self.to_node),
                (node, client, self.to_client),
            ):
                strikes = fault if fault is not None and fault.take() else None
                threading.Thread(
                    target=self._pump, args=(source, target, strikes), daemon=True
                ).start()

    def _pump(self, source: socket.socket, target: socket.socket, fault: Fault | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                if self.delay_s:
                    time.sleep(self.delay_s)
                place = -1 if fault is None else fault.after_bytes - passed
                if fault is not None and 0 <= place < len(data):
                    passed += len(data)
                    spoilt = _SPOIL[fault.kind](data, place)
                    target.sendall(spoilt)
                    if fault.kind is Kind.CUT:
                        break
                    if fault.kind is Kind.STALL:
                        self._ended.wait()
                        break
                    continue
                passed += len(data)
                target.sendall(data)
        _hang_up(source)
        _hang_up(target)


def _flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


_SPOIL: dict[Kind, Callable[[bytes, int], bytes]] = {
    Kind.CUT: lambda data, place: data[:place],
    Kind.STALL: lambda data, place: data[:place],
    Kind.FLIP: _flip,
    Kind.DROP: lambda data, place: data[:place] + data[place + 16 :],
    Kind.INSERT: lambda data, place: data[:place] + bytes(16) + data[place:],
}


def _hang_up(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
