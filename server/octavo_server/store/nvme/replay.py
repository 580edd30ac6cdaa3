"""What is live after a store's files are read again. Pure: bytes in, records out.

The rules, and why a damaged file never brings back what was deleted:

- The tail behind the last sound frame of a file is torn: a crash interrupted a group commit
  that nobody had been told of. It is cut off.
- A damaged frame with sound frames behind it lost what had been acknowledged. Lost PUTs are
  misses. Lost FORGETs (evictions) can leave records of bodies that were overwritten since: the
  younger of two records that claim the same bytes wins, and the digest, bound to key, layout,
  unit, variant and length, turns what is left of them into misses on their first read.
- Lost DELETEs would bring back pages that somebody asked to be gone. Each frame tells how many
  deletes came before it, so a reader notices; it cannot know which, and forgets every record
  older than the gap.
- DELETEs are synced to the device before they are acknowledged. Only damage to exactly the
  last frame of the last log can hide one, for nothing behind it tells of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo_server.store.nvme.records import (
    BODY_ALIGN_BYTES,
    HEADER_BYTES,
    RECORD,
    FileKind,
    FrameHeader,
    Kind,
    Records,
    decode_header,
    magic_rows,
)

ROWS_PER_RECORD: Final = RECORD.itemsize // HEADER_BYTES
FIRST_SEQUENCE: Final = 1

_NO_RECORDS: Final = np.empty(0, dtype=RECORD)


@dataclass(frozen=True, slots=True)
class FileScan:
    """The sound frames of one file. ``records`` are theirs, one after the other."""

    frames: list[FrameHeader]
    records: Records
    sound_bytes: int
    """Up to the end of the last sound frame."""
    torn: bool
    """There is something behind the last sound frame."""
    gap_count: int
    """Damaged places with sound frames behind them."""


@dataclass(frozen=True, slots=True)
class Replay:
    """``live``: PUT records in no particular order, no two of the same unit or bytes."""

    live: Records
    next_sequence: int
    delete_count: int
    lost_record_count: int = 0
    distrusted_record_count: int = 0
    overlap_count: int = 0


def scan(data: NDArray[np.uint8], kind: FileKind, number: int, seed: int) -> FileScan:
    """Finds the sound frames of a file of ``kind`` and ``number``."""
    row_count = len(data) // HEADER_BYTES
    rows = data[: row_count * HEADER_BYTES].reshape(row_count, HEADER_BYTES)
    view = data.data
    frames: list[FrameHeader] = []
    is_record = np.zeros(row_count, dtype=np.bool_)
    candidates: list[int] | None = None  # where else a frame may begin, last first
    row = sound_rows = gap_count = 0
    while row < row_count:
        header = decode_header(view, row * HEADER_BYTES, seed)
        if header is not None and header.file_kind == kind and header.file_number == number:
            if row != sound_rows:
                gap_count += 1
            end = row + 1 + header.record_count * ROWS_PER_RECORD
            is_record[row + 1 : end] = True
            frames.append(header)
            row = sound_rows = end
            continue
        if candidates is None:
            candidates = magic_rows(rows)[::-1].tolist()
        while candidates and candidates[-1] <= row:
            candidates.pop()
        if not candidates:
            break
        row = candidates.pop()
    records = np.ascontiguousarray(rows[is_record]).reshape(-1).view(RECORD)
    sound_bytes = sound_rows * HEADER_BYTES
    return FileScan(frames, records, sound_bytes, sound_bytes < len(data), gap_count)


class LogEnd(NamedTuple):
    """Where a log must have ended, for who knows: whoever switched to the next one."""

    next_sequence: int
    delete_count: int


@dataclass(slots=True)
class _Walk:
    """Checks that frames follow each other, over all logs in their order."""

    sequence: int
    deletes: int
    record_at: int
    trusted_from: int = 0
    lost_record_count: int = 0
    stale_ranges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def frame(self, header: FrameHeader, deletes_within: int) -> None:
        end = self.record_at + header.record_count
        if header.first_sequence < self.sequence:  # told before: a copy of an older frame
            self.stale_ranges.append((self.record_at, end))
        else:
            self.lost_record_count += header.first_sequence - self.sequence
            if header.deletes_before != self.deletes:
                self.trusted_from = self.record_at
            self.sequence = header.first_sequence + header.record_count
            self.deletes = header.deletes_before + deletes_within
        self.record_at = end


def replay(
    snapshot: FileScan | None, logs: Sequence[FileScan], end: LogEnd | None = None
) -> Replay:
    """State after ``snapshot`` (none for a young store) and then ``logs`` in their order."""
    base = snapshot.frames[0] if snapshot and snapshot.frames else None
    base_records = snapshot.records if snapshot else _NO_RECORDS
    walk = _Walk(
        sequence=base.first_sequence if base else FIRST_SEQUENCE,
        deletes=base.deletes_before if base else 0,
        record_at=len(base_records),
    )
    for log in logs:
        deletes_at = np.cumsum(log.records["kind"] == Kind.DELETE, dtype=np.int64)
        begin = seen = 0
        for header in log.frames:
            begin += header.record_count
            total = int(deletes_at[begin - 1]) if begin else 0
            walk.frame(header, total - seen)
            seen = total
    if end is not None:
        walk.frame(FrameHeader(FileKind.LOG, 0, 0, end.next_sequence, end.delete_count), 0)
    records = np.concatenate([base_records, *(log.records for log in logs)])
    if walk.stale_ranges:
        sound = np.ones(len(records), dtype=np.bool_)
        for stale_begin, stale_end in walk.stale_ranges:
            sound[stale_begin:stale_end] = False
        trusted = sound & (np.arange(len(records)) >= walk.trusted_from)
        records = records[trusted]
    elif walk.trusted_from:
        records = records[walk.trusted_from :]
    live = records[_live_rows(records)]
    kept = _without_overlaps(live)
    return Replay(
        live=kept,
        next_sequence=walk.sequence,
        delete_count=walk.deletes,
        lost_record_count=walk.lost_record_count,
        distrusted_record_count=walk.trusted_from,
        overlap_count=len(live) - len(kept),
    )


def _live_rows(records: Records) -> NDArray[np.intp]:
    """Rows of the PUTs that hold: the last of their unit, and not forgotten since.

    A FORGET counts only for the body at its own offset: a unit that was written again, to
    another slot, before its old slot was forgotten lives on. A DELETE counts for any.
    """
    count = len(records)
    if not count:
        return np.empty(0, dtype=np.intp)
    kind = records["kind"]
    key = records["key"]
    place = records["namespace"].astype(np.uint64) << np.uint64(8) | records["unit"]
    order = np.lexsort((place, key[:, 1], key[:, 0]))  # stable: file order within a unit
    starts = np.ones(count, dtype=np.bool_)
    for column in (place, key[:, 0], key[:, 1]):
        ordered = column[order]
        starts[1:] &= ordered[1:] == ordered[:-1]
    starts[1:] = ~starts[1:]
    first = np.flatnonzero(starts)
    kind = kind[order]
    at = np.arange(count)
    last_put = np.maximum.reduceat(np.where(kind == Kind.PUT, at, -1), first)
    alive = last_put >= 0
    removals = np.flatnonzero(kind != Kind.PUT)
    if len(removals):
        group = np.searchsorted(first, removals, side="right") - 1
        put = last_put[group]
        offset = records["offset"][order]
        kills = (removals > put) & (
            (kind[removals] == Kind.DELETE) | (offset[removals] == offset[put])
        )
        alive[group[kills]] = False
    rows: NDArray[np.intp] = order[last_put[alive]]
    return rows


def _without_overlaps(live: Records) -> Records:
    """``live`` without the older of any two records that claim the same bytes.

    Happens only where FORGETs were lost. Where three overlap in a row it may drop one more than
    it must, which costs a miss.
    """
    while len(live) > 1:
        live = live[np.argsort(live["offset"], kind="stable")]
        begin = live["offset"]
        end = begin + (live["length"].astype(np.uint64) + np.uint64(BODY_ALIGN_BYTES - 1)) // (
            np.uint64(BODY_ALIGN_BYTES)
        ) * np.uint64(BODY_ALIGN_BYTES)
        clash = np.flatnonzero(end[:-1] > begin[1:])
        if not len(clash):
            break
        older = live["sequence"][clash] <= live["sequence"][clash + 1]
        live = np.delete(live, np.unique(np.where(older, clash, clash + 1)))
    return live
