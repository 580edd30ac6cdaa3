"""The directory of a store: whose it is, and what its files are called."""

from __future__ import annotations

import fcntl
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiofiles

from octavo_server.store.file_ops import FileOps
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.config import StoreError
from octavo_server.store.nvme.records import BODY_ALIGN_BYTES, FORMAT_VERSION, FileKind

LOCK_NAME: Final = "LOCK"
IDENTITY_NAME: Final = "store.json"
REGISTRY_NAME: Final = "registry.json"
BODIES_NAME: Final = "bodies.dat"
TEMPORARY_SUFFIX: Final = ".tmp"

_NUMBERED: Final = re.compile(r"(log|snapshot)-(\d+)\.oct")
_FRESH_NAMES: Final = {LOCK_NAME, "lost+found"}
"""What may lie in a directory in which a store is made: a new file system has one of them."""

_FOREIGN_NAMES_SHOWN: Final = 3
_HOLDER_BYTES: Final = 20


@dataclass(frozen=True, slots=True)
class NumberedFiles:
    """Logs and snapshots that lie in a directory, by number."""

    logs: dict[int, Path]
    snapshots: dict[int, Path]

    def relevant(self) -> tuple[Path | None, dict[int, Path]]:
        """The newest snapshot and the logs that go on from it, in order."""
        number = max(self.snapshots, default=0)
        logs = {n: path for n, path in sorted(self.logs.items()) if n >= number}
        return self.snapshots.get(number), logs

    def older_than(self, number: int) -> list[Path]:
        """What snapshot ``number`` makes superfluous."""
        both = [*self.logs.items(), *self.snapshots.items()]
        return [path for n, path in both if n < number]


def numbered_path(directory: Path, kind: FileKind, number: int) -> Path:
    return directory / f"{kind.name.lower()}-{number}.oct"


def numbered_files(directory: Path) -> NumberedFiles:
    """Raises OSError."""
    found = NumberedFiles({}, {})
    for path in directory.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match:
            by_number = found.logs if match[1] == "log" else found.snapshots
            by_number[int(match[2])] = path
    return found


def lock_directory(directory: Path) -> int:
    """Makes ``directory`` if need be and takes it for this process: the lock's descriptor.

    The lock ends with the descriptor, so a killed node leaves none behind.

    Raises:
        StoreError: another node has it, or it can't be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"the NVMe directory {directory} can't be used: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Padded, so that it overwrites the last holder's and needs no room on a full disk.
        os.pwrite(fd, str(os.getpid()).encode().ljust(_HOLDER_BYTES), 0)
    except BlockingIOError:
        holder = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
        os.close(fd)
        by = f"process {holder}" if holder.isdigit() else "another process"
        raise StoreError(
            f"the NVMe directory {directory} is in use by {by}: give each node its own"
        ) from None
    except OSError as error:
        os.close(fd)
        raise StoreError(f"the NVMe directory {directory} can't be used: {error}") from error
    return fd


@dataclass(frozen=True, slots=True)
class Identity:
    """What a store is from its making to its end: a 16-byte id, and how its room is cut."""

    store_id: bytes
    slab_bytes: int


async def identify(directory: Path, slab_bytes: int, io: IoPool, files: FileOps) -> Identity:
    """The identity of the store in ``directory``. An empty directory gets one, with slabs of
    ``slab_bytes``; a store that exists keeps those it was made with, for its units lie in them.

    Raises:
        StoreError: foreign files lie there, or a store of another format.
        OSError: the device failed.
    """
    path = directory / IDENTITY_NAME
    if path.exists():
        identity = await read_json(path)
        if identity.get("format") != FORMAT_VERSION:
            raise StoreError(
                f"the store in {directory} has format {identity.get('format')!r}, this version "
                f"of Octavo knows {FORMAT_VERSION}: use the version that made it, or empty it"
            )
        try:
            return _identity(identity)
        except (KeyError, ValueError, TypeError, AttributeError):
            raise StoreError(
                f"{path} names no store id and slabs: it was damaged, or isn't ours"
            ) from None
    if foreign := await io.run(lambda: _foreign_names(directory)):
        shown = ", ".join(foreign[:_FOREIGN_NAMES_SHOWN])
        raise StoreError(
            f"{directory} holds files but no {IDENTITY_NAME} ({shown}): give an empty directory"
        )
    store_id = uuid.uuid4()
    identity = {
        "format": FORMAT_VERSION,
        "store_id": str(store_id),
        "slab_bytes": slab_bytes,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    await write_json(path, identity, io, files)
    return Identity(store_id.bytes, slab_bytes)


def _identity(stored: dict[str, Any]) -> Identity:
    slab_bytes = stored["slab_bytes"]
    if not isinstance(slab_bytes, int) or slab_bytes <= 0 or slab_bytes % BODY_ALIGN_BYTES:
        raise ValueError("slab_bytes")
    return Identity(uuid.UUID(stored["store_id"]).bytes, slab_bytes)


def _foreign_names(directory: Path) -> list[str]:
    names = sorted(path.name for path in directory.iterdir() if path.name not in _FRESH_NAMES)
    return [name for name in names if not name.endswith(TEMPORARY_SUFFIX)]


async def read_json(path: Path) -> dict[str, Any]:
    """Raises StoreError where ``path`` holds no JSON object, OSError where it can't be read."""
    async with aiofiles.open(path, "rb") as file:
        text = await file.read()
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise StoreError(
            f"{path} is damaged ({error}): empty the directory to begin anew"
        ) from None
    if not isinstance(value, dict):
        raise StoreError(f"{path} is damaged (no object): empty the directory to begin anew")
    return value  # pyright: ignore[reportUnknownVariableType] - JSON objects have string keys


async def write_json(path: Path, value: Mapping[str, Any], io: IoPool, files: FileOps) -> None:
    """Replaces ``path`` at once: readers and crashes see the old or the new. Raises OSError."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    async with aiofiles.open(temporary, "wb") as file:
        await file.write(json.dumps(value, indent=1).encode())
        await file.flush()
        await io.run(lambda: files.fdatasync(file.fileno()))

    def replace() -> None:
        files.rename(temporary, path)
        files.sync_directory(path.parent)

    await io.run(replace)
