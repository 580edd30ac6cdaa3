"""Quantities as people read them."""

from __future__ import annotations


def bytes_text(size_bytes: int) -> str:
    """``360 B``, ``22.5 KiB``, ``4.0 GiB``."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def count_text(count: int) -> str:
    """``8,192``."""
    return f"{count:,}"


def seconds_text(duration_s: float) -> str:
    """``12 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 3 h``."""
    whole = int(duration_s)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
