"""System calls that fail on demand: the disk we are afraid of."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo_server.store.file_ops import Buffer, FileOps

Fault = Callable[[str], int | None]
"""Given a file's name: the errno of the failure, or None to let the call through."""


def always(code: int, name_contains: str = "") -> Fault:
    """Fails every call on files whose name contains ``name_contains``."""
    return lambda name: code if name_contains in name else None


class FaultyFiles(FileOps):
    """Real calls on real files, except where a fault is set for the call's name.

    ``short_bytes`` bounds what one pwritev takes, ``short_read_bytes`` what one preadv brings.
    Reads that touch one of ``bad_offsets`` fail with EIO. ``calls`` counts by call name.
    ``crash_at`` names a call (and the part of a file name) before which the process "is killed":
    it and all later calls raise ``Crash`` and do nothing.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}
        self.short_bytes: int | None = None
        self.short_read_bytes: int | None = None
        self.bad_offsets: set[int] = set()
        self.refuse_direct_open = False
        self.refuse_direct_io = False
        self.crash_at: tuple[str, str] | None = None
        self.crashed = False
        self.calls: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._direct: set[int] = set()

    def _enter(self, call: str, name: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        if self.crash_at is not None and call == self.crash_at[0] and self.crash_at[1] in name:
            self.crashed = True
        if self.crashed:
            raise Crash(f"{call} {name}")
        fault = self.faults.get(call)
        if fault is not None and (code := fault(name)) is not None:
            raise OSError(code, os.strerror(code), name)

    def _enter_io(self, call: str, fd: int) -> None:
        self._enter(call, self._names.get(fd, ""))
        if self.refuse_direct_io and fd in self._direct:
            raise OSError(errno.EINVAL, "refused")

    def open(self, path: Path, flags: int) -> int:
        self._enter("open", path.name)
        if flags & os.O_DIRECT and self.refuse_direct_open:
            raise OSError(errno.EINVAL, "refused")
        fd = super().open(path, flags)
        self._names[fd] = path.name
        self._direct.discard(fd)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._enter_io("preadv", fd)
        if any(0 <= bad - offset < sum(map(len, buffers)) for bad in self.bad_offsets):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.short_read_bytes is not None:
            buffers = [memoryview(buffers[0])[: self.short_read_bytes]]
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._enter_io("pwritev", fd)
        if self.short_bytes is not None:
            buffers = [memoryview(buffers[0])[: self.short_bytes]]
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync", self._names.get(fd, ""))
        super().fdatasync(fd)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._enter("truncate", self._names.get(fd, ""))
        super().truncate(fd, size_bytes)

    def free_bytes(self, fd: int) -> int:
        self._enter("free_bytes", self._names.get(fd, ""))
        return super().free_bytes(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._enter("rename", target.name)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._enter("unlink", path.name)
        super().unlink(path)


class Crash(BaseException):
    """The process ends here, as far as the store can tell."""
