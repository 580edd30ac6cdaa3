"""The codecs' figures as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_SPEEDS = ("pack_gbps", "unpack_gbps", "unpack_ratio")
_KINDS = ("benign", "outlier", "bias")


def show_codecs(codecs: Mapping[str, Mapping[str, Any]]) -> None:
    """A row a codec: bytes, speeds, and errors in percent as K / attention."""
    table = Table("codec", title="codecs", title_justify="left")
    for name in ("bytes", *_SPEEDS, *(f"{kind} K / attention %" for kind in _KINDS)):
        table.add_column(name, justify="right")
    for name, figures in codecs.items():
        errors = (
            f"{figures[kind]['k_centred_error']:.2%} / {figures[kind]['attention_error']:.2%}"
            for kind in _KINDS
        )
        speeds = (f"{figures[speed]:.2f}" if speed in figures else "-" for speed in _SPEEDS)
        table.add_row(name, f"{figures['bytes_ratio']:.3f}", *speeds, *errors)
    Console().print(table)
