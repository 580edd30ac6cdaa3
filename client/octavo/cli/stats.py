"""``octavo stats``: what a node says about itself."""

from __future__ import annotations

import json
import time

from google.protobuf.json_format import MessageToDict

from octavo.cli.node import get_statistics
from octavo.cli.text import bytes_text, count_text, seconds_text
from octavo_proto.v1 import admin_pb2

CLEAR_SCREEN = "\x1b[H\x1b[2J"


def show_stats(address: str, *, as_json: bool, watch: bool, interval_s: float) -> None:
    """Prints a node's statistics once, or every ``interval_s`` until interrupted.

    Raises:
        CommandError: the node does not answer.
    """
    while True:
        answer = get_statistics(address)
        if as_json:
            print(json.dumps(statistics_dict(answer)), flush=True)
        else:
            if watch:
                print(CLEAR_SCREEN, end="")
            _print_tables(answer)
        if not watch:
            return
        time.sleep(interval_s)


def statistics_dict(answer: admin_pb2.GetStatisticsResponse) -> dict[str, object]:
    """The answer as plain values for JSON; integers stay integers."""
    tiers: list[dict[str, object]] = [
        {
            "tier": tier.tier,
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
            "page_bytes": tier.page_bytes,
            "page_count": tier.page_count,
        }
        for tier in answer.tiers
    ]
    rest = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {**rest, "tiers": tiers, "counters": dict(answer.counters)}


def _print_tables(answer: admin_pb2.GetStatisticsResponse) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"node [bold]{answer.node_id}[/bold]  version {answer.version}  "
        f"up {seconds_text(answer.uptime_s)}  boot {answer.boot_id}",
        highlight=False,
    )
    tiers = Table("tier", title="Tiers", title_justify="left")
    for heading in ("pages", "content", "slots in use", "capacity", "full"):
        tiers.add_column(heading, justify="right")
    for tier in answer.tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        tiers.add_row(
            tier.tier,
            count_text(tier.page_count),
            bytes_text(tier.page_bytes),
            bytes_text(tier.used_bytes),
            bytes_text(tier.capacity_bytes),
            f"{share:.1%}",
        )
    console.print(tiers)
    values = Table("counter", title="Since start", title_justify="left")
    values.add_column("value", justify="right")
    for name, count in sorted(answer.counters.items()):
        values.add_row(name, bytes_text(count) if name.endswith("_bytes") else count_text(count))
    for name, value in sorted(answer.gauges.items()):
        text = bytes_text(int(value)) if name.endswith("_bytes") else f"{value:,.6g}"
        values.add_row(f"{name} (now)", text)
    console.print(values)
    for problem in answer.problems:
        console.print(f"[bold red]problem[/bold red] {problem}", highlight=False)
