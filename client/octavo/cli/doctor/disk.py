"""Checks of the NVMe tier's directory."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

from octavo.cli.doctor.finding import Finding, Verdict
from octavo.cli.text import bytes_text

ALIGN_BYTES = 4096


def check_direct_io(directory: Path) -> Finding:
    """Whether files in ``directory`` can be written and read past the page cache."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".octavo-doctor-", dir=directory)
    except OSError as error:
        return Finding(
            "O_DIRECT",
            Verdict.FAIL,
            f"{directory}: {error.strerror}",
            "the NVMe tier cannot write there",
            "choose a directory that the node's user may write",
        )
    os.close(descriptor)
    try:
        _write_and_read_direct(name)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return Finding(
                "O_DIRECT",
                Verdict.FAIL,
                f"{directory}: {error.strerror}",
                "the NVMe tier cannot do I/O there",
                "check the device and the file system",
            )
        return Finding(
            "O_DIRECT",
            Verdict.WARN,
            f"{directory}: refused by its file system",
            "pages go through the kernel's page cache: twice the memory, less speed",
            "use ext4 or xfs on a local disk",
        )
    finally:
        os.unlink(name)
    return Finding("O_DIRECT", Verdict.OK, f"works in {directory}")


def check_space(directory: Path, nvme_bytes: int | None, guard_bytes: int) -> Finding:
    """Whether the tier's capacity and the guard fit into the file system."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return Finding(
            "disk space", Verdict.FAIL, f"{directory}: {error.strerror}", "no NVMe tier there"
        )
    free_bytes = found.f_bavail * found.f_frsize + _own_bytes(directory)
    text = f"{bytes_text(free_bytes)} for the tier in {directory}"
    wanted = (nvme_bytes or 0) + guard_bytes
    if free_bytes < wanted:
        return Finding(
            "disk space",
            Verdict.WARN,
            f"{text}, {bytes_text(wanted)} wanted (capacity and guard)",
            "the tier stops growing at the free-space guard, before its capacity",
            "lower nvme_bytes, or make room",
        )
    return Finding("disk space", Verdict.OK, text)


def check_disk(directory: Path, nvme_bytes: int | None, guard_bytes: int) -> list[Finding]:
    """All checks of this module."""
    if not directory.is_dir():
        return [
            Finding(
                "nvme_dir",
                Verdict.WARN,
                f"{directory} is no directory (yet)",
                "the node makes it at its start, if it may",
                f"mkdir -p {directory}",
            )
        ]
    return [check_direct_io(directory), check_space(directory, nvme_bytes, guard_bytes)]


def _own_bytes(directory: Path) -> int:
    """What a node's files there take already: they count towards its capacity."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory) if entry.is_file())


def _write_and_read_direct(name: str) -> None:
    descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    try:
        # An anonymous mapping is page-aligned, which O_DIRECT wants of the buffer.
        with mmap.mmap(-1, ALIGN_BYTES) as buffer:
            buffer[:6] = b"octavo"
            os.pwritev(descriptor, [buffer], 0)
            buffer[:6] = bytes(6)
            os.preadv(descriptor, [buffer], 0)
            if buffer[:6] != b"octavo":
                raise OSError(errno.EIO, "what was read is not what was written")
    finally:
        os.close(descriptor)
