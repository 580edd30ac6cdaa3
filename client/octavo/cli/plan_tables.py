"""The tables of ``octavo plan``."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from octavo.cli.text import bytes_text, count_text
from octavo.plan import ModelShape, Plan
from octavo.plan.codec_bytes import RAW
from octavo.plan.hardware import LINKS
from octavo.plan.report import rules


def print_plan(plan: Plan, codec: str) -> None:
    """Bytes, room and times by codec; the row of ``codec`` stands out."""
    console, request = Console(), plan.request
    console.print(
        f"[bold]{request.model.name}[/bold]  {request.model.parameters / 1e9:,.1f} B parameters, "
        f"weights {bytes_text(plan.weight_bytes)}\n"
        f"{count_text(request.session_count)} sessions of "
        f"{count_text(request.context_tokens)} tokens, pages of {plan.layout.page_tokens}; "
        f"TP {plan.shards.tp} x PP {plan.shards.pp} x DP {request.dp} on {request.gpu.name}",
        highlight=False,
    )
    raw = plan.codecs[RAW]
    sizes = _table("Bytes", "codec", "token", "page", "sequence", "a rank's", "all")
    room = _table(
        f"Room ({bytes_text(plan.gpu_room_bytes)} of HBM left on a GPU)",
        *("codec", "bytes of raw", "sessions a GPU", "memory a node", "NVMe a node"),
    )
    for name, each in plan.codecs.items():
        style = "bold" if name == codec else ""
        sizes.add_row(
            name,
            f"{each.bytes_per_token:,.0f} B",
            bytes_text(each.page_bytes),
            bytes_text(each.sequence_bytes),
            bytes_text(each.rank_sequence_bytes),
            bytes_text(each.total_bytes),
            style=style,
        )
        room.add_row(
            name,
            f"{each.page_bytes / raw.page_bytes:.3f}",
            f"{each.sessions_per_gpu:,.2f}",
            bytes_text(each.memory_bytes_per_node),
            bytes_text(each.nvme_bytes_per_node),
            style=style,
        )
    times = _table(
        f"Until a sequence is back (computed anew: {_time_text(plan.recompute_s)})",
        *("over", *plan.codecs),
    )
    for link in LINKS:
        times.add_row(
            link.label, *(_time_text(each.restore_s[link.name]) for each in plan.codecs.values())
        )
    times.add_row(
        "break-even, GB/s",
        *(f"{each.break_even_bytes_per_s / 1e9:.2f}" for each in plan.codecs.values()),
    )
    times.caption = "PCIe: each GPU over its own. RDMA, NVMe: one port, one drive."
    times.caption_justify = "left"
    for table in (sizes, room, times):
        console.print(table)
    for rule in rules(plan):
        console.print(rule, highlight=False)


def print_models(models: Iterable[ModelShape]) -> None:
    """The known models and the size of their KV."""
    table = _table("Known models", "model", "weights", "layers", "KV heads", "dims", "token")
    for model in models:
        table.add_row(
            model.name,
            f"{model.parameters / 1e9:,.1f} B",
            str(model.layers),
            str(model.kv_heads),
            f"{model.head_dim} + {model.rope_dim}" if model.rope_dim else str(model.head_dim),
            bytes_text(model.raw_token_bytes),
        )
    Console().print(table)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(first, title=title, title_justify="left")
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _time_text(duration_s: float) -> str:
    return f"{duration_s * 1000:,.0f} ms" if duration_s < 1 else f"{duration_s:,.1f} s"
