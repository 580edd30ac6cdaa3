"""Reading a store's metadata files back, and writing them down shorter. Blocking: for threads.

A compaction is a recovery that is written down. The log is switched to number n+1 first; then
a thread replays what lies before it, as a restart would, and writes snapshot n+1, which
replaces all files of lower numbers once it is complete, synced and renamed. A crash before
the rename finds the old files and both logs; one after it, the snapshot and log n+1.

Reading the files, rather than the tables of the running node, needs no agreement about what
is under way between the two: what was acknowledged is in the files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo_server.store.file_ops import FileOps, read_fully, write_fully
from octavo_server.store.nvme.directory import (
    TEMPORARY_SUFFIX,
    NumberedFiles,
    numbered_files,
    numbered_path,
)
from octavo_server.store.nvme.records import (
    FRAME_RECORDS_MAX,
    FileKind,
    FrameHeader,
    Records,
    encode_frame,
)
from octavo_server.store.nvme.replay import LogEnd, Replay, replay, scan


@dataclass(frozen=True, slots=True)
class StoredState:
    """What the metadata files say, and in which state they are."""

    replay: Replay
    log_number: int
    """Of the last log; 0 where there is none."""
    log_sound_bytes: int
    log_record_count: int
    torn_count: int
    gap_count: int


def read_state(
    directory: Path,
    files: FileOps,
    seed: int,
    *,
    before: int | None = None,
    end: LogEnd | None = None,
) -> StoredState:
    """Replays the files in ``directory``, of numbers below ``before`` if given. Raises OSError."""
    found = numbered_files(directory)
    if before is not None:
        found = NumberedFiles(
            {n: path for n, path in found.logs.items() if n < before},
            {n: path for n, path in found.snapshots.items() if n < before},
        )
    snapshot_path, log_paths = found.relevant()
    number = max(found.snapshots, default=0)
    snapshot = None
    if snapshot_path is not None:
        snapshot = scan(_read_file(snapshot_path, files), FileKind.SNAPSHOT, number, seed)
    logs = [scan(_read_file(path, files), FileKind.LOG, n, seed) for n, path in log_paths.items()]
    scans = [*logs, snapshot] if snapshot else logs
    return StoredState(
        replay=replay(snapshot, logs, end),
        log_number=max(log_paths, default=number),
        log_sound_bytes=logs[-1].sound_bytes if logs else 0,
        log_record_count=sum(len(log.records) for log in logs),
        torn_count=sum(s.torn for s in scans),
        gap_count=sum(s.gap_count for s in scans),
    )


def write_snapshot(
    directory: Path, number: int, live: Records, end: LogEnd, *, seed: int, files: FileOps
) -> None:
    """Writes snapshot ``number``: the state at ``end``, before log ``number``.

    Older files are removed behind it.

    Raises:
        OSError: the old files are still the ones that count.
    """
    path = numbered_path(directory, FileKind.SNAPSHOT, number)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        fd = files.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            at = 0
            # The first frame is there even for an empty store: it says where the log goes on.
            for begin in range(0, max(1, len(live)), FRAME_RECORDS_MAX):
                part = live[begin : begin + FRAME_RECORDS_MAX]
                header = FrameHeader(
                    FileKind.SNAPSHOT, number, len(part), end.next_sequence, end.delete_count
                )
                frame = encode_frame(header, part, seed)
                write_fully(files, fd, memoryview(frame), at)
                at += len(frame)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    files.sync_directory(directory)
    remove_superseded(directory, files)


def remove_superseded(directory: Path, files: FileOps) -> None:
    """Removes what the newest snapshot replaces, and what crashes left behind. Raises OSError."""
    found = numbered_files(directory)
    for path in found.older_than(max(found.snapshots, default=0)):
        files.unlink(path)


def remove_temporaries(directory: Path, files: FileOps) -> None:
    """Removes half-written files of a crashed run. Raises OSError."""
    for path in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        files.unlink(path)


def compact(
    directory: Path,
    number: int,
    end: LogEnd,
    *,
    seed: int,
    files: FileOps,
    layouts: NDArray[np.uint16],
) -> int:
    """Replaces all files of numbers below ``number`` by a snapshot; log ``number`` goes on.

    ``end`` is where the log before it ended. Answers how many records of logs that spared the
    next restart. Raises OSError.
    """
    state = read_state(directory, files, seed, before=number, end=end)
    live = state.replay.live
    live = live[np.isin(live["layout"], layouts)]
    write_snapshot(directory, number, live, end, seed=seed, files=files)
    return state.log_record_count


def _read_file(path: Path, files: FileOps) -> NDArray[np.uint8]:
    fd = files.open(path, os.O_RDONLY)
    try:
        data = np.empty(files.size_bytes(fd), dtype=np.uint8)
        if len(data):
            count = read_fully(files, fd, data.data, 0)
            data = data[:count]
        return data
    finally:
        files.close(fd)
