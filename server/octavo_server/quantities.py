"""Byte sizes and durations as people write them: ``8GiB``, ``30s``."""

from __future__ import annotations

import math
import re
from typing import Final

_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")

_BYTES: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_bytes(value: object) -> int:
    """A whole number of bytes from ``4294967296``, ``"4GiB"`` or ``"1.5 GB"``.

    Raises:
        ValueError: not such a text, negative, or no whole number of bytes.
    """
    allowed = "a size such as 4294967296, 512MiB or 8GiB"
    number, unit = _split(value, allowed)
    factor = _BYTES.get(unit.lower())
    if factor is None:
        raise ValueError(
            f"{unit!r} is no unit of bytes; allowed: B, KiB, MiB, GiB, TiB, kB, MB ..."
        )
    size_bytes = number * factor
    if not float(size_bytes).is_integer():
        raise ValueError(f"{value!r} is no whole number of bytes")
    return int(size_bytes)


def parse_seconds(value: object) -> float:
    """Seconds from ``30``, ``"30s"``, ``"500ms"``, ``"10m"`` or ``"1h"``.

    Raises:
        ValueError: not such a text, or negative.
    """
    allowed = "a duration such as 30, 30s, 500ms, 10m or 1h"
    number, unit = _split(value, allowed)
    factor = _SECONDS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{unit!r} is no unit of time; allowed: ms, s, m, h")
    return number * factor


def _split(value: object, allowed: str) -> tuple[int | float, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{value!r} is not {allowed}")
        return value, ""
    if isinstance(value, str) and (found := _NUMBER_AND_UNIT.fullmatch(value.strip())):
        digits, unit = found.groups()
        return (float(digits) if "." in digits else int(digits)), unit
    raise ValueError(f"{value!r} is not {allowed}")
