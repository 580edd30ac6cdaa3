"""The node's master key, and the namespace keys made from it.

A namespace's key is HKDF-SHA256 of the master key under the namespace's name. Page keys are
made from it, so nobody without it can name a page. The file is made on first start and must
outlive the pages: with another key, nothing that was stored is found again.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from octavo_proto.limits import NAMESPACE_KEY_BYTES
from octavo_server.places import PlaceError

MASTER_KEY_BYTES: Final = 32
_SALT: Final = b"octavo-namespace-1"


def load_master_key(path: Path) -> bytes:
    """The key in ``path``; a missing file is made, readable by its owner only.

    Raises:
        PlaceError: the file can't be read or made, is no key, or others may read it.
    """
    try:
        _make_once(path)
        if path.stat().st_mode & 0o077:
            raise PlaceError(f"master_key_file {path}: others may read it; chmod 600 it")
        key = path.read_bytes()
    except OSError as error:
        raise PlaceError(f"master_key_file {path}: {error.strerror}") from None
    if len(key) != MASTER_KEY_BYTES:
        raise PlaceError(
            f"master_key_file {path}: has {len(key)} bytes, must have {MASTER_KEY_BYTES}"
        )
    return key


def namespace_key(master_key: bytes, namespace: str) -> bytes:
    """The 32-byte key of a namespace."""
    derivation = HKDF(
        algorithm=SHA256(), length=NAMESPACE_KEY_BYTES, salt=_SALT, info=namespace.encode()
    )
    return derivation.derive(master_key)


def _make_once(path: Path) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A name of our own: two nodes in two containers may have the same process id.
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(MASTER_KEY_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(part, path)  # of two nodes that start at once, one key wins for both
    except FileExistsError:
        pass
    finally:
        os.unlink(part)
