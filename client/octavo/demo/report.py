"""The demo on a terminal: what happens as it happens, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.cli.text import bytes_text, count_text
from octavo.demo.messages import TurnReport
from octavo.demo.verdict import Runs, Verdict, ratio_of
from octavo.results import TierStatistics

MIB: Final = 1 << 20


class Narrator:
    """Says what happens. With ``--json`` on stderr, so that stdout carries the object alone."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False)

    def step(self, text: str) -> None:
        """A new part of the story."""
        self._console.print(f"[bold cyan]>[/] {escape(text)}")

    def detail(self, text: str) -> None:
        """Something within it."""
        self._console.print(f"  {escape(text)}", style="dim")

    def turn(self, report: TurnReport) -> None:
        """A question, its answer and what it took."""
        self._line(f"  [yellow]?[/] {escape(report.question)}")
        self._line(f"    {escape(' '.join(report.answer.split()))}")
        self.figures(report)

    def figures(self, report: TurnReport) -> None:
        """What a turn took."""
        packed_by = f"{report.codec}: " if report.stored_bytes else ""
        self.detail(
            f"  {packed_by}first token after {_milliseconds(report.ttft_s)}: "
            f"{count_text(report.computed_tokens)} tokens computed, "
            f"{count_text(report.loaded_tokens)} loaded, of {count_text(report.prompt_tokens)}"
        )

    def _line(self, markup: str) -> None:
        self._console.print(markup, no_wrap=True, overflow="ellipsis")

    def problem(self, text: str) -> None:
        """Something went wrong."""
        self._console.print(f"[bold red]![/] {escape(text)}")

    def result(self, runs: Runs, verdict: Verdict, elapsed_s: float) -> None:
        """The tables and the verdict."""
        self._console.print()
        self._console.print(_turns_table(runs))
        self._console.print(_tiers_table(runs))
        self._console.print(_codecs_table(runs))
        for problem in verdict.problems:
            self.problem(problem)
        for note in verdict.notes:
            self._console.print(f"[yellow]note[/] {escape(note)}")
        equal = "equal to" if verdict.answers_equal else "DIFFERENT from"
        colour = "bold green" if not verdict.problems else "bold red"
        self._console.print(
            f"[{colour}]Answers over three workers and a killed node are {equal} those of an "
            f"uninterrupted run; {verdict.failed_pages} pages failed.[/] ({elapsed_s:.0f} s)"
        )


def _turns_table(runs: Runs) -> Table:
    table = Table(title="Time to first token, and tokens of the prompt", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("prompt", "computed", "loaded", "MiB", "TTFT ms", "of cold"):
        table.add_column(heading, justify="right", no_wrap=True)
    cold_memory, cold_nvme = runs.cold.turns
    memory, nvme = runs.memory.turns[0], runs.nvme.turns[0]
    for name, turn, cold in (
        ("turn 7, cold", cold_memory, cold_memory),
        ("  from memory (B)", memory, cold_memory),
        ("turn 8, cold", cold_nvme, cold_nvme),
        ("  from NVMe (C)", nvme, cold_nvme),
    ):
        table.add_row(
            name,
            count_text(turn.prompt_tokens),
            count_text(turn.computed_tokens),
            count_text(turn.loaded_tokens),
            f"{turn.loaded_bytes / MIB:.1f}",
            f"{turn.ttft_s * 1000:,.0f}",
            f"{ratio_of(turn, cold):.3f}",
        )
    return table


def _tiers_table(runs: Runs) -> Table:
    table = Table(title="Pages by tier", title_justify="left")
    for heading in ("", "tier"):
        table.add_column(heading)
    for heading in ("pages", "page bytes", "bytes used"):
        table.add_column(heading, justify="right")
    for when, tiers in (
        ("before kill -9", runs.tiers_before_kill),
        ("after restart and turn 8", runs.tiers_after),
    ):
        for name, tier in _named(when, tiers):
            table.add_row(
                name,
                tier.tier,
                count_text(tier.page_count),
                bytes_text(tier.page_bytes),
                bytes_text(tier.used_bytes),
            )
    return table


def _codecs_table(runs: Runs) -> Table:
    table = Table(title="Turn 7 from memory, by codec (raw is float32 here)", title_justify="left")
    table.add_column("codec", no_wrap=True)
    tiers = tuple(runs.by_codec.turns[0].stored_bytes)
    for heading in (*(f"{tier} MiB" for tier in tiers), "TTFT ms", "of cold", "answer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for turn in runs.by_codec.turns:
        differing = runs.differing_tokens(turn)
        table.add_row(
            turn.codec,
            *(f"{turn.stored_bytes[tier] / MIB:.1f}" for tier in tiers),
            f"{turn.ttft_s * 1000:,.0f}",
            f"{ratio_of(turn, runs.cold.turns[0]):.3f}",
            f"{differing} of {len(turn.answer_tokens)} tokens differ" if differing else "equal",
        )
    return table


def _named(when: str, tiers: Iterable[TierStatistics]) -> Iterable[tuple[str, TierStatistics]]:
    for index, tier in enumerate(tiers):
        yield ("" if index else when), tier


def _milliseconds(duration_s: float) -> str:
    return f"{duration_s * 1000:,.0f} ms"
