"""The Lua scripts by which Redis is changed, one call for many pages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final, Self


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and the digest by which Redis knows it."""

    text: str
    sha1: str

    @classmethod
    def of(cls, text: str) -> Self:
        """A script by its text."""
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _load(*names: str) -> Script:
    folder = resources.files("octavo_server.index") / "lua"
    return Script.of("\n".join((folder / f"{name}.lua").read_text() for name in names))


APPLY: Final = _load("buckets", "apply")
LOOK: Final = _load("buckets", "look")
NUMBERS: Final = _load("numbers")
OWN: Final = _load("buckets", "own")
TAKE_OUT: Final = _load("buckets", "take_out")
SWEEP: Final = _load("buckets", "sweep")
REGISTRY: Final = _load("registry")
