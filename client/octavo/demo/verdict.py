"""What the demo found out: figures, and everything that is not as it should be."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from octavo.demo.messages import RAW_CODEC, TurnReport
from octavo.demo.processes import WorkerResult
from octavo.results import FlushResult, TierStatistics

GOOD_STATUSES: Final = frozenset({"STORED", "ALREADY_PRESENT", "DONE"})

MEMORY_RATIO_MAX: Final = 0.25
"""A prefix of 2,000 tokens from memory must cost at most this share of computing it."""


@dataclass(frozen=True, slots=True)
class Runs:
    """All that happened."""

    uninterrupted: WorkerResult
    """One process, no Octavo: every turn."""
    cold: WorkerResult
    """No Octavo, nothing kept: turns 7 and 8."""
    first: WorkerResult
    """Worker A: turns 1 to 6."""
    memory: WorkerResult
    """Worker B: turn 7."""
    nvme: WorkerResult
    """Worker C: turn 8, after the node's restart."""
    by_codec: WorkerResult
    """Worker D: turn 7, once a codec."""
    flush: FlushResult
    tiers_before_kill: Sequence[TierStatistics]
    tiers_after: Sequence[TierStatistics]
    restart_s: float
    page_tokens: int

    @property
    def with_octavo(self) -> tuple[TurnReport, ...]:
        """The conversation as it went over three workers."""
        return self.first.turns + self.memory.turns + self.nvme.turns

    def differing_tokens(self, turn: TurnReport) -> int:
        """Places where one of worker D's answers is not the uninterrupted run's."""
        expected = self.uninterrupted.turns[len(self.first.turns)].answer_tokens
        pairs = itertools.zip_longest(turn.answer_tokens, expected)
        return sum(token != other for token, other in pairs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures and problems of a demo."""

    answers_equal: bool
    failed_pages: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    """Not as hoped, yet no failure."""


def judge(runs: Runs) -> Verdict:
    """Compares answers token by token and looks at every page's status."""
    problems: list[str] = []
    equal = True
    last_turns = runs.uninterrupted.turns[-len(runs.cold.turns) :]
    for name, turns, expected in (
        ("with Octavo", runs.with_octavo, runs.uninterrupted.turns),
        ("computed from nothing", runs.cold.turns, last_turns),
    ):
        for turn, reference in zip(turns, expected, strict=True):
            if turn.answer_tokens != reference.answer_tokens:
                equal = equal and name != "with Octavo"
                problems.append(f"{name}, the answer to {turn.question!r} differs")
    for turn in runs.by_codec.turns:
        whole = (turn.prompt_tokens - 1) // runs.page_tokens * runs.page_tokens
        if dict(turn.tokens_by_tier) != {"memory": whole}:
            found = dict(turn.tokens_by_tier)
            problems.append(f"{turn.codec} should have found {whole} tokens in memory, not {found}")
        # Codecs that round may answer otherwise; how much is a figure, not a failure.
        if turn.codec == RAW_CODEC and runs.differing_tokens(turn):
            equal = False
            problems.append(f"with Octavo and codec {turn.codec}, the answer to turn 7 differs")
    failed = _failed(runs)
    problems += [f"{count} pages ended as {status}" for status, count in failed.items()]
    if runs.flush.volatile_pages:
        problems.append(f"{runs.flush.volatile_pages} pages could not be made durable")
    before = (runs.first, runs.memory)
    for who, worker, previous, tier in (
        ("B", runs.memory, before[0], "memory"),
        ("C", runs.nvme, before[1], "nvme"),
    ):
        full = previous.end.held_tokens // runs.page_tokens * runs.page_tokens
        found = dict(worker.turns[0].tokens_by_tier)
        if found != {tier: full}:
            problems.append(f"worker {who} should have found {full} tokens in {tier}, not {found}")
    notes: list[str] = []
    ratio = ratio_of(runs.memory.turns[0], runs.cold.turns[0])
    if ratio > MEMORY_RATIO_MAX:
        notes.append(f"time to first token from memory is {ratio:.2f} of cold: a busy machine?")
    return Verdict(equal, sum(failed.values()), tuple(problems), tuple(notes))


def ratio_of(loaded: TurnReport, cold: TurnReport) -> float:
    """Time to first token, as a share of computing the same prompt from nothing."""
    return loaded.ttft_s / cold.ttft_s


def summary(runs: Runs, verdict: Verdict, elapsed_s: float) -> dict[str, Any]:
    """The demo's one JSON object."""
    return {
        "ok": not verdict.problems,
        "answers_equal": verdict.answers_equal,
        "failed_pages": verdict.failed_pages,
        "problems": list(verdict.problems),
        "notes": list(verdict.notes),
        "cold": [_turn_figures(turn) for turn in runs.cold.turns],
        "memory": _turn_figures(runs.memory.turns[0])
        | {"ttft_ratio": round(ratio_of(runs.memory.turns[0], runs.cold.turns[0]), 4)},
        "nvme": _turn_figures(runs.nvme.turns[0])
        | {"ttft_ratio": round(ratio_of(runs.nvme.turns[0], runs.cold.turns[1]), 4)},
        "codecs": {turn.codec: _codec_figures(runs, turn) for turn in runs.by_codec.turns},
        "restart_s": round(runs.restart_s, 3),
        "transport": runs.memory.end.transport,
        "durable_pages": runs.flush.durable_pages,
        "volatile_pages": runs.flush.volatile_pages,
        "put_units": dict(_statuses(turn.put_statuses for turn in runs.with_octavo)),
        "tiers_before_kill": {tier.tier: _tier_figures(tier) for tier in runs.tiers_before_kill},
        "tiers_after": {tier.tier: _tier_figures(tier) for tier in runs.tiers_after},
        "margin_min": round(min(turn.margin for turn in runs.uninterrupted.turns), 4),
        "elapsed_s": round(elapsed_s, 1),
    }


def _turn_figures(turn: TurnReport) -> dict[str, Any]:
    return {
        "ttft_ms": round(turn.ttft_s * 1000, 1),
        "load_ms": round(turn.load_s * 1000, 1),
        "prompt_tokens": turn.prompt_tokens,
        "computed_tokens": turn.computed_tokens,
        "loaded_tokens": turn.loaded_tokens,
        "loaded_bytes": turn.loaded_bytes,
    }


def _codec_figures(runs: Runs, turn: TurnReport) -> dict[str, Any]:
    differing = runs.differing_tokens(turn)
    return _turn_figures(turn) | {
        "ttft_ratio": round(ratio_of(turn, runs.cold.turns[0]), 4),
        "stored_bytes": dict(turn.stored_bytes),
        "answer_equal": differing == 0,
        "answer_tokens": len(turn.answer_tokens),
        "differing_tokens": differing,
    }


def _tier_figures(tier: TierStatistics) -> dict[str, int]:
    return {
        "page_count": tier.page_count,
        "page_bytes": tier.page_bytes,
        "used_bytes": tier.used_bytes,
        "capacity_bytes": tier.capacity_bytes,
    }


def _failed(runs: Runs) -> Counter[str]:
    statuses = _statuses(
        counts
        for turn in (*runs.with_octavo, *runs.by_codec.turns)
        for counts in (turn.get_statuses, turn.put_statuses)
    )
    return Counter(
        {status: count for status, count in statuses.items() if status not in GOOD_STATUSES}
    )


def _statuses(counted: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in counted:
        total.update(counts)
    return total
