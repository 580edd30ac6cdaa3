"""Makes sure, before a node starts, that it can have what its settings name.

Each check answers with one line that says what is wrong and what to do. None of them is a
guard against races: they turn a stack trace from deep inside into a sentence. The exception
is ``SocketClaim``, which two nodes cannot hold at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from octavo_server.addresses import HostPort

PRIVATE_MODE: Final = 0o700


class PlaceError(Exception):
    """A directory, socket or port cannot be used; the message is one line."""


def make_private_directory(directory: Path, *, allow_open: bool) -> None:
    """Makes ``directory`` with mode 0700, or checks that it is the user's alone.

    Raises:
        PlaceError: it belongs to somebody else, or others may enter it and ``allow_open`` is
            not set, or it cannot be made.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=PRIVATE_MODE, exist_ok=True)
        # lstat as well: below a shared directory, somebody else could have put a link here.
        owners = {directory.lstat().st_uid, directory.stat().st_uid}
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError as error:
        raise PlaceError(f"{directory}: cannot be made ({error.strerror})") from None
    if allow_open:
        return
    if owners != {os.geteuid()}:
        raise PlaceError(
            f"{directory}: belongs to uid {max(owners - {os.geteuid()})}, not to you; choose "
            "another listen_unix, or set allow_open_socket_directory if you trust its owner"
        )
    if mode & 0o077:
        raise PlaceError(
            f"{directory}: other users can enter it (mode {mode:04o}); chmod 700 it, choose "
            "another listen_unix, or set allow_open_socket_directory if that is meant"
        )


def make_writable_directory(name: str, directory: Path) -> None:
    """Makes ``directory`` if need be and tries to write to it.

    Raises:
        PlaceError: that fails. ``name`` is the setting to blame.
    """
    try:
        directory.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise PlaceError(f"{name} {directory}: is not writable ({error.strerror})") from None


def require_free_port(name: str, address: HostPort) -> None:
    """Binds ``address`` for a moment. gRPC itself would share the port without a word.

    Raises:
        PlaceError: the port is in use, or the host is not one of this machine.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise PlaceError(f"{name} {address}: host not found ({error.strerror})") from None
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
            probe.listen(1)
        except OSError as error:
            raise PlaceError(
                f"{name} {address}: cannot listen there ({error.strerror}); "
                "choose another port, or stop what uses it"
            ) from None


def require_memory(memory_bytes: int) -> None:
    """Raises PlaceError if an arena of ``memory_bytes`` is larger than this machine's memory."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory_bytes > physical_bytes:
        raise PlaceError(
            f"memory_bytes {memory_bytes}: this machine has {physical_bytes} bytes of memory"
        )


class SocketClaim:
    """The right to listen on a Unix socket, held while the process lives.

    A lock file beside the socket makes it exclusive: gRPC removes whatever it finds at the
    path, so without it a second node would take a running one's socket away.
    """

    def __init__(self, path: Path) -> None:
        lock = path.with_name(path.name + ".lock")
        try:
            self._descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PlaceError(f"listen_unix {path}: {lock}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise PlaceError(f"listen_unix {path}: exists and is no socket")
            path.unlink()  # left behind by a node that was killed
        except BlockingIOError:
            holder = os.pread(self._descriptor, 16, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise PlaceError(
                f"listen_unix {path}: a node is listening there already (pid {holder or '?'})"
            ) from None
        except FileNotFoundError:
            pass
        except PlaceError:
            os.close(self._descriptor)
            raise
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)
