"""Which model and weights an engine runs: two engines share pages only if both agree.

Hashing whole weights would take minutes for a large model, and each worker does it. The first
bytes of every tensor tell any two trainings apart, for training moves all of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

HEAD_BYTES: Final = 4096
"""Read of each tensor: 1024 float32 values. 8B parameters are 291 tensors, 1.2 MB."""

SAMPLES: Final = 256
"""Places at which a file of another format is read."""

HEADER_BYTES_MAX: Final = 100 << 20
"""Longer headers are not of a safetensors file (its own limit)."""

WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def weights_digest(folder: Path) -> str:
    """Names the weights in a checkpoint's or adapter's folder: 32 hexadecimal digits.

    It covers each weight file's name, size, header and the first bytes of every tensor, and
    the configuration.

    Raises:
        FileNotFoundError: no weights in there.
    """
    weights = sorted(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))
    if not weights:
        raise FileNotFoundError(f"no weights in {folder}")
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / "config.json", folder / "adapter_config.json"):
        if path.exists():
            digest.update(path.read_bytes())
    for path in weights:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for piece in _samples(path):
            digest.update(piece)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        begins = list(_tensor_begins(path)) if path.suffix == ".safetensors" else []
        if not begins:
            begins = [size_bytes * place // SAMPLES for place in range(SAMPLES)]
        for begin in begins:
            file.seek(begin)
            yield file.read(HEAD_BYTES)


def _tensor_begins(path: Path) -> Iterator[int]:
    """Where the header and each tensor of a safetensors file begin."""
    with path.open("rb") as file:
        head = file.read(8)
        header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < header_bytes <= HEADER_BYTES_MAX:
            return
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            return
    yield 0
    for entry in cast("dict[str, Any]", header).values():
        if "data_offsets" in entry:
            yield 8 + header_bytes + int(entry["data_offsets"][0])
