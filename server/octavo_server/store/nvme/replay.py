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
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo_server.store.nvme.records import (
    BODY_ALIGN_BYTES,
    HEADER,
    HEADER_BYTES,
    RECORD,
    FileKind,
    Kind,
    Records,
    magic_rows,
    sound_record_count,
)

ROWS_PER_RECORD: Final = RECORD.itemsize // HEADER_BYTES
FIRST_SEQUENCE: Final = 1

_NO_RECORDS: Final = np.empty(0, dtype=RECORD)
_NO_HEADERS: Final = np.empty(0, dtype=HEADER)


@dataclass(frozen=True, slots=True)
class FileScan:
    """The sound frames of one file. ``records`` are theirs, one after the other."""

    headers: NDArray[np.void]
    """Of the frames: an array of HEADER."""
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
    frame_rows: list[int] = []
    candidates: list[int] | None = None  # where else a frame may begin, last first
    row = sound_rows = gap_count = 0
    while row < row_count:
        count = sound_record_count(
            view, row * HEADER_BYTES, file_kind=kind, file_number=number, seed=seed
        )
        if count is not None:
            if row != sound_rows:
                gap_count += 1
            frame_rows.append(row)
            row += 1 + count * ROWS_PER_RECORD
            sound_rows = row
            continue
        if candidates is None:
            candidates = magic_rows(rows)[::-1].tolist()
        while candidates and candidates[-1] <= row:
            candidates.pop()
        if not candidates:
            break
        row = candidates.pop()
    headers_at = np.array(frame_rows, dtype=np.int64)
    headers = rows[headers_at].reshape(-1).view(HEADER)
    edges = np.zeros(row_count + 1, dtype=np.int8)  # +1 where records begin, -1 behind them
    begins = headers_at + 1
    ends = begins + headers["record_count"].astype(np.int64) * ROWS_PER_RECORD
    edges[begins[ends > begins]] = 1
    edges[ends[ends > begins]] = -1
    records = rows[np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)]
    sound_bytes = sound_rows * HEADER_BYTES
    return FileScan(
        headers, records.reshape(-1).view(RECORD), sound_bytes, sound_bytes < len(data), gap_count
    )


class LogEnd(NamedTuple):
    """Where a log must have ended, for who knows: whoever switched to the next one."""

    next_sequence: int
    delete_count: int


class _Trust(NamedTuple):
    """What the frames of all logs, in their order, say about each other."""

    end: LogEnd
    trusted_from: int | None
    """The first log record that no lost delete can have been about; None if none was lost."""
    lost_record_count: int
    stale: list[tuple[int, int]]
    """Ranges of log records that repeat what was told before."""


def _trust(start: LogEnd, logs: Sequence[FileScan], end: LogEnd | None) -> _Trust:
    headers = np.concatenate([_NO_HEADERS, *(log.headers for log in logs)])
    first = headers["first_sequence"].astype(np.int64)
    count = headers["record_count"].astype(np.int64)
    before = headers["deletes_before"].astype(np.int64)
    kinds = [_NO_RECORDS["kind"], *(log.records["kind"] for log in logs)]
    deletes = np.concatenate(kinds) == Kind.DELETE
    ends_at = np.cumsum(count)
    deletes_until = np.concatenate([[0], np.cumsum(deletes)])
    within = deletes_until[ends_at] - deletes_until[ends_at - count]
    if end is not None:
        first = np.append(first, end.next_sequence)
        before = np.append(before, end.delete_count)
        count, within = np.append(count, 0), np.append(within, 0)
    told = np.append(start.next_sequence, first + count)
    told_deletes = np.append(start.delete_count, before + within)
    if (first == told[:-1]).all() and (before == told_deletes[:-1]).all():
        return _Trust(LogEnd(int(told[-1]), int(told_deletes[-1])), None, 0, [])
    # Something is missing or repeated: one frame after the other.
    sequence, delete_count = start
    record_at = lost = 0
    trusted_from: int | None = None
    stale: list[tuple[int, int]] = []
    columns = (first.tolist(), count.tolist(), before.tolist(), within.tolist())
    for frame_first, frame_count, frame_before, frame_within in zip(*columns, strict=True):
        if frame_first < sequence:
            stale.append((record_at, record_at + frame_count))
        else:
            lost += frame_first - sequence
            if frame_before != delete_count:
                trusted_from = record_at
            sequence = frame_first + frame_count
            delete_count = frame_before + frame_within
        record_at += frame_count
    return _Trust(LogEnd(sequence, delete_count), trusted_from, lost, stale)


def replay(
    snapshot: FileScan | None, logs: Sequence[FileScan], end: LogEnd | None = None
) -> Replay:
    """State after ``snapshot`` (none for a young store) and then ``logs`` in their order."""
    start = LogEnd(FIRST_SEQUENCE, 0)
    base_records = _NO_RECORDS
    if snapshot is not None and len(snapshot.headers):
        base_records = snapshot.records
        base = snapshot.headers[0]
        start = LogEnd(int(base["first_sequence"]), int(base["deletes_before"]))
    trust = _trust(start, logs, end)
    log_records = [log.records for log in logs]
    distrusted = 0
    if trust.stale or trust.trusted_from is not None:
        joined = np.concatenate([_NO_RECORDS, *log_records])
        believed = np.arange(len(joined)) >= (trust.trusted_from or 0)
        for stale_begin, stale_end in trust.stale:
            believed[stale_begin:stale_end] = False
        if trust.trusted_from is not None:
            distrusted = len(base_records) + trust.trusted_from
            base_records = _NO_RECORDS
        log_records = [joined[believed]]
    records = np.concatenate([base_records, *log_records])
    live = records[_live_rows(records)]
    kept = _without_overlaps(live)
    return Replay(
        live=kept,
        next_sequence=trust.end.next_sequence,
        delete_count=trust.end.delete_count,
        lost_record_count=trust.lost_record_count,
        distrusted_record_count=distrusted,
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
