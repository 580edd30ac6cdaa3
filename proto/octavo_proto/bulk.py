"""Frames of bulk streams: plain TCP connections that carry unit bytes and nothing else.

What is asked for was granted or reserved over gRPC before; ``docs/protocol.md`` tells how the
two work together. All integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo_proto import columns
from octavo_proto.limits import KEY_BYTES

MAGIC: Final = 0x4F43424B
VERSION: Final = 1

HELLO: Final = struct.Struct(f"<II{KEY_BYTES}s")
"""The client's first words: magic, version, ticket."""

WELCOME: Final = struct.Struct("<II")
"""The node's: magic, version. A node that refuses the ticket hangs up instead."""

_REQUEST: Final = struct.Struct("<IIIIQ")
_ANSWER: Final = struct.Struct("<IIIIQ")
REQUEST_BYTES: Final = _REQUEST.size
ANSWER_BYTES: Final = _ANSWER.size

GET: Final = 1
PUT: Final = 2

ROWS_MAX: Final = 1024
"""Units of one request: what one ``sendmsg`` takes, and little work for the node's event loop."""

PART_BYTES: Final = 8 << 20
"""Bytes that a client asks for or sends at a time, or a single unit: large beside the cost of a
request, small enough that several streams share a chain evenly."""


class FrameError(ValueError):
    """The other side does not speak this protocol; the stream is of no more use."""


class Request(NamedTuple):
    """``GET``: the rows from ``first`` on of lease ``name``. ``PUT``: units for reservation
    ``name``; ``first`` is 0, and their columns and bytes follow."""

    kind: int
    first: int
    row_count: int
    name: int

    def pack(self) -> bytes:
        return _REQUEST.pack(MAGIC, *self)


class Answer(NamedTuple):
    """``status`` is a ``Status`` of the protocol. To a ``GET``: DONE, and ``size_bytes`` of unit
    bytes follow, or why none do. To a ``PUT``: DONE, and ``row_count`` statuses follow, a byte
    each."""

    kind: int
    status: int
    row_count: int
    size_bytes: int

    def pack(self) -> bytes:
        return _ANSWER.pack(MAGIC, *self)


class UnitsSent(NamedTuple):
    """The columns of a ``PUT``, one row a unit. ``digests`` are of the bytes as they left."""

    positions: NDArray[np.int64]
    units: NDArray[np.int64]
    lengths: NDArray[np.int64]
    digests: NDArray[np.uint64]

    def pack(self) -> bytes:
        """All four, one behind the other."""
        return b"".join(
            columns.write(column, dtype) for column, dtype in zip(self, _COLUMN_DTYPES, strict=True)
        )


_COLUMN_DTYPES: Final[tuple[np.dtype[Any], ...]] = (
    columns.U32,
    columns.U8,
    columns.U32,
    columns.U64,
)
UNIT_ROW_BYTES: Final = sum(dtype.itemsize for dtype in _COLUMN_DTYPES)
"""Bytes of one row of ``UnitsSent`` on the wire."""


def read_request(data: bytes) -> Request:
    """A request's header.

    Raises:
        FrameError: it is none, or asks for no row or too many.
    """
    magic, *fields = _REQUEST.unpack(data)
    request = Request(*fields)
    if magic != MAGIC or request.kind not in (GET, PUT):
        raise FrameError(f"no request: magic {magic:#x}, kind {request.kind}")
    if not 0 < request.row_count <= ROWS_MAX:
        raise FrameError(f"a request for {request.row_count} rows, allowed: 1 to {ROWS_MAX}")
    return request


def read_units(data: bytes, row_count: int) -> UnitsSent:
    """The columns of a ``PUT`` of so many units: ``row_count * UNIT_ROW_BYTES`` bytes."""
    parts: list[NDArray[Any]] = []
    begin = 0
    for dtype in _COLUMN_DTYPES:
        end = begin + row_count * dtype.itemsize
        parts.append(np.frombuffer(data[begin:end], dtype=dtype))
        begin = end
    positions, units, lengths, digests = parts
    return UnitsSent(
        positions.astype(np.int64), units.astype(np.int64), lengths.astype(np.int64), digests
    )


def read_answer(data: bytes, asked: Request) -> Answer:
    """The header of the answer to ``asked``.

    Raises:
        FrameError: it is none, or answers something else.
    """
    magic, *fields = _ANSWER.unpack(data)
    answer = Answer(*fields)
    same = (answer.kind, answer.row_count) == (asked.kind, asked.row_count)
    if magic != MAGIC or not same or answer.status > 255:
        raise FrameError(
            f"asked for {asked.row_count} rows (kind {asked.kind}), answered with magic "
            f"{magic:#x}, kind {answer.kind}, {answer.row_count} rows"
        )
    return answer
