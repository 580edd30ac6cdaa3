"""The rows of ``octavo bench rag`` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_SHARES: Final = ("recompute_rate", "floor", "redundant")
_SOURCES: Final = ("engine", "memory", "nvme", "computed")


def show_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A row each: shares in percent, times to first token, tokens by where they came from."""
    table = Table("row", title="a chat about documents", title_justify="left")
    for name in ("computed", "floor", "redundant", "TTFT p50 / p90 ms", "tokens/s", *_SOURCES):
        table.add_column(name, justify="right")
    for name, figures in rows.items():
        table.add_row(
            name,
            *(f"{figures[share]:.2%}" for share in _SHARES),
            f"{figures['ttft_p50_ms']:,.0f} / {figures['ttft_p90_ms']:,.0f}",
            f"{figures['tokens_per_s']:.1f}",
            *(f"{figures['hits'][source]:,}" for source in _SOURCES),
        )
    Console().print(table)
