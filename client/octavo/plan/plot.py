"""Draws a plan. Needs matplotlib (``octavo[plots]``)."""

# matplotlib leaves the types of its keyword arguments open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.plan.hardware import LINKS
from octavo.plan.sizing import Plan

INCHES: Final = (12.0, 4.6)
DOTS_PER_INCH: Final = 120
CONTEXT_MIN: Final = 1024
"""Where the curves begin: shorter prompts are not worth loading or drawing."""


def draw_plan(plan: Plan, codec: str, path: Path) -> None:
    """Writes two panels to ``path``: bytes a token and sessions a GPU by codec, and the time to
    bring a sequence back under ``codec`` or to compute it anew, by its length.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib knows no format of that ending.
    """
    figure = Figure(figsize=INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(
        f"{plan.request.model.name} on {plan.request.gpu.name}, "
        f"TP {plan.shards.tp} x PP {plan.shards.pp} x DP {plan.request.dp}"
    )
    _draw_codecs(plan, left)
    _draw_times(plan, codec, right)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_codecs(plan: Plan, axes: Axes) -> None:
    names = list(plan.codecs)
    sizes = [each.sequence_bytes / 1e9 for each in plan.codecs.values()]
    bars = axes.bar(names, sizes, color="#4c78a8")
    axes.bar_label(
        bars,
        [f"{each.sessions_per_gpu:,.2f}" for each in plan.codecs.values()],
    )
    axes.set_ylabel("GB a sequence")
    axes.set_title(f"{plan.request.context_tokens:,} tokens (on the bars: sessions a GPU)")
    axes.tick_params(axis="x", rotation=20)


def _draw_times(plan: Plan, codec: str, axes: Axes) -> None:
    lengths = _lengths(plan.request.context_tokens)
    plans = [plan.at_context(length) for length in lengths]
    for link in LINKS:
        times = [each.codecs[codec].restore_s[link.name] for each in plans]
        style = "-" if link.is_per_gpu else "--"
        axes.plot(lengths, times, style, label=link.label, linewidth=1.2)
    anew = [each.recompute_s for each in plans]
    axes.plot(lengths, anew, label="computed anew", color="black", linewidth=2.0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _tick: f"{tokens:,.0f}")
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds")
    axes.set_title(f"Until a sequence is back ({codec})")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small")


def _lengths(context_tokens: int) -> list[int]:
    """Powers of two below, then the length itself."""
    lengths: list[int] = []
    length = CONTEXT_MIN
    while length < context_tokens:
        lengths.append(length)
        length *= 2
    return [*lengths, context_tokens]
