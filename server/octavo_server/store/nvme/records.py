"""The bytes of the metadata log: records, and the frames that carry them. Pure.

A frame is a header of 48 bytes and the records of one group commit, 96 bytes each. Its digest
covers the header, the records and the identity of the store, so that a torn frame, a flipped
bit or a piece of another store's log is recognised. Everything is little-endian.

A header says which sequence number its first record has and how many deletes came before it
since the store was made. A reader that meets a damaged frame learns from the next sound one
how many records it lost and whether a delete was among them (``replay.py``).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

RECORD: Final = np.dtype(
    [
        ("kind", "u1"),
        ("unit", "u1"),
        ("unit_count", "u1"),  # units of the whole page
        ("flags", "u1"),  # 0 for now
        ("variant", "<u2"),
        ("layout", "<u2"),  # number in the registry
        ("namespace", "<u4"),  # number in the registry
        ("position", "<u4"),  # of the page in its chain
        ("key", "<u8", (2,)),
        ("parent", "<u8", (2,)),
        ("offset", "<u8"),  # of the body in bodies.dat
        ("length", "<u4"),  # of the body, unpadded
        ("reserved_a", "<u4"),
        ("digest", "<u8"),  # XXH3-64 of the body under octavo_proto.keys.digest_seed
        ("sequence", "<u8"),  # given by the store
        ("expires_ms", "<u8"),  # when its page expires, in milliseconds since 1970; 0 is never
        ("reserved_b", "<u8"),
    ]
)
"""What the log knows of one unit. Reserved fields are 0, so that one which comes into use later
is 0 in older records: 0 must then mean what held before."""

Records = NDArray[np.void]
"""A one-dimensional array of RECORD."""

BODY_ALIGN_BYTES: Final = 4096
"""Bodies start on this boundary and are padded to it: what O_DIRECT asks for at most."""

NO_OFFSET: Final = -1
"""In the answer of ``NvmeStore.allocate``: no room for this unit."""

FORMAT_VERSION: Final = 1

FRAME_MAGIC: Final = 0x4F52464F
FRAME_RECORDS_MAX: Final = 65_536
"""6 MiB: what a snapshot writes at a time, and the most that one damaged frame can lose."""

HEADER_BYTES: Final = 48
_HEADER: Final = struct.Struct("<IHBxIIQQQ")  # and 8 bytes of digest
_HEADER_DIGEST: Final = struct.Struct("<Q")
_DIGEST_AT: Final = HEADER_BYTES - _HEADER_DIGEST.size
_digest = xxhash.xxh3_64_intdigest

HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("file_kind", "u1"),
        ("reserved_a", "u1"),
        ("record_count", "<u4"),
        ("file_number", "<u4"),
        ("first_sequence", "<u8"),
        ("deletes_before", "<u8"),
        ("reserved_b", "<u8"),
        ("digest", "<u8"),
    ]
)
"""The same header as ``_HEADER`` reads, for many at a time."""

assert RECORD.itemsize == 2 * HEADER_BYTES
assert HEADER.itemsize == HEADER_BYTES
assert _HEADER.size == _DIGEST_AT


class Kind(IntEnum):
    """What a record says."""

    PUT = 1
    """The unit lies at ``offset``."""
    FORGET = 2
    """The unit that lay at ``offset`` was evicted; its slot may be used again."""
    DELETE = 3
    """Somebody asked that the unit goes: it must never come back, wherever it lies."""


class FileKind(IntEnum):
    """What a frame belongs to."""

    LOG = 1
    SNAPSHOT = 2


class FrameHeader(NamedTuple):
    """``deletes_before``: DELETE records of this store before this frame's first record."""

    file_kind: FileKind
    file_number: int
    record_count: int
    first_sequence: int
    deletes_before: int


def padded_bytes(length: int) -> int:
    """``length`` rounded up to whole 4 KiB."""
    return -(-length // BODY_ALIGN_BYTES) * BODY_ALIGN_BYTES


def store_seed(store_id: bytes) -> int:
    """What binds frames to one store."""
    return xxhash.xxh3_64_intdigest(b"octavo-store" + store_id)


def count_deletes(records: Records) -> int:
    return int(np.count_nonzero(records["kind"] == Kind.DELETE))


def encode_frame(header: FrameHeader, records: Records, seed: int) -> bytes:
    """The bytes of one frame. ``records`` must carry ``header.record_count`` records."""
    assert len(records) == header.record_count <= FRAME_RECORDS_MAX
    payload = records.tobytes()
    head = _HEADER.pack(
        FRAME_MAGIC,
        FORMAT_VERSION,
        header.file_kind,
        header.record_count,
        header.file_number,
        header.first_sequence,
        header.deletes_before,
        0,
    )
    digest = _digest(payload, _digest(head, seed))
    return head + _HEADER_DIGEST.pack(digest) + payload


def sound_record_count(
    data: memoryview, at: int, *, file_kind: FileKind, file_number: int, seed: int
) -> int | None:
    """Records of the whole and sound frame of this file that begins at byte ``at``, or None.

    A restart calls this for every frame there is: it is as short as it can be.
    """
    if at + HEADER_BYTES > len(data):
        return None
    magic, version, kind, count, number, _, _, _ = _HEADER.unpack_from(data, at)
    records_at = at + HEADER_BYTES
    end = records_at + count * RECORD.itemsize
    if magic != FRAME_MAGIC or version != FORMAT_VERSION or count > FRAME_RECORDS_MAX:
        return None
    if end > len(data) or kind != file_kind or number != file_number:
        return None
    digest_at = at + _DIGEST_AT
    frame_seed = _digest(data[at:digest_at], seed)
    if (_digest(data[records_at:end], frame_seed),) != _HEADER_DIGEST.unpack_from(data, digest_at):
        return None
    return int(count)


def magic_rows(rows: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Which of ``rows`` (bytes, shape [n, 48]) begin like a frame."""
    words: NDArray[Any] = rows[:, :4].copy().view("<u4")[:, 0]
    return np.flatnonzero(words == FRAME_MAGIC)
