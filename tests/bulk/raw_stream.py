"""Bulk streams spoken by hand, for what the client would never send."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from tests.integration.raw import TIMEOUT_S, RawSession

from octavo_proto import bulk, columns
from octavo_proto.keys import digest_seed, unit_digest
from octavo_proto.layout import Layout
from octavo_proto.v1 import cache_pb2


class RawStream(AbstractContextManager["RawStream"]):
    """A connection to the bulk port that has shown ``ticket``."""

    def __init__(self, port: int, ticket: bytes, *, buffer_bytes: int = 0) -> None:
        """``buffer_bytes``: of the kernel's receive buffer, so that the node's sends stall soon."""
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(bulk.HELLO.pack(bulk.MAGIC, bulk.VERSION, ticket))

    def __exit__(self, *_exception: object) -> None:
        self.socket.close()

    @property
    def is_welcome(self) -> bool:
        """Whether the node has admitted it; to be asked once."""
        welcome = self.socket.recv(bulk.WELCOME.size, socket.MSG_WAITALL)
        return welcome == bulk.WELCOME.pack(bulk.MAGIC, bulk.VERSION)

    @property
    def has_ended(self) -> bool:
        """Whether the node hangs up without another word."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def read(self, size_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < size_bytes:
            part = self.socket.recv(size_bytes - len(data))
            assert part, f"the node hung up after {len(data)} of {size_bytes} bytes"
            data += part
        return bytes(data)

    def get(self, lease_id: int, first: int, row_count: int) -> bulk.Answer:
        """Asks for units; their bytes follow the answer."""
        request = bulk.Request(bulk.GET, first, row_count, lease_id)
        self.send(request.pack())
        return bulk.read_answer(self.read(bulk.ANSWER_BYTES), request)

    def put_header(self, reservation_id: int, sent: bulk.UnitsSent) -> bulk.Request:
        request = bulk.Request(bulk.PUT, 0, len(sent.positions), reservation_id)
        self.send(request.pack(), sent.pack())
        return request

    def put(self, reservation_id: int, sent: bulk.UnitsSent, data: bytes) -> list[int]:
        """Sends units; the status of each."""
        request = self.put_header(reservation_id, sent)
        self.send(data)
        bulk.read_answer(self.read(bulk.ANSWER_BYTES), request)
        return list(self.read(request.row_count))


def open_session(address: str, layout: Layout) -> RawSession:
    return RawSession(address, layouts=[layout], want_bulk=True)


def open_stream(session: RawSession, **options: Any) -> RawStream:
    """One more stream of a session, admitted."""
    request = cache_pb2.IssueBulkTicketRequest(session_id=session.session_id)
    issued = session.cache.IssueBulkTicket(request, timeout=TIMEOUT_S)
    stream = RawStream(session.opened.bulk.port, issued.ticket, **options)
    assert stream.is_welcome
    return stream


def grant_of(session: RawSession, chain: cache_pb2.Chain) -> cache_pb2.GrantBatch:
    """The first grant of a chain's units, for streams."""
    stream = session.get(chain, delivery=cache_pb2.DELIVERY_BULK)
    response: cache_pb2.GetResponse = next(iter(stream))
    assert response.WhichOneof("part") == "grants"
    return response.grants


def sent_units(
    chain: cache_pb2.Chain, layout: Layout, units: list[bytes], first: int = 0
) -> bulk.UnitsSent:
    """Columns for one unit a page, from position ``first`` on."""
    positions = np.arange(first, first + len(units))
    digests = [
        unit_digest(
            data,
            digest_seed(chain.keys[position * 16 :][:16], layout.fingerprint(), 0, 1, len(data)),
        )
        for position, data in zip(positions.tolist(), units, strict=True)
    ]
    return bulk.UnitsSent(
        positions,
        np.zeros(len(units), dtype=np.int64),
        np.array([len(data) for data in units]),
        np.array(digests, dtype=columns.U64),
    )
