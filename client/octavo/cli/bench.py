"""``octavo bench``: measurements with their ceiling taken in the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import typer

app = typer.Typer(
    help="Measure Octavo on this machine, beside the machine's own ceiling.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def show_figures(title: str, figures: Mapping[str, object], *, as_json: bool) -> None:
    """One JSON object as the last line, or a table."""
    if as_json:
        print(json.dumps(figures), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", title=title, title_justify="left")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
