"""The demo says that all is well only when it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.demo.test_messages import TURN

from octavo.demo.messages import TurnReport, WorkerEnd
from octavo.demo.processes import WorkerResult
from octavo.demo.verdict import Runs, judge, summary
from octavo.results import FlushResult, TierStatistics


def make_turn(number: int, *, tier: str = "", ttft_s: float = 4.0) -> TurnReport:
    loaded = 96 if tier else 0
    return replace(
        TURN,
        question=f"question {number}",
        answer_tokens=(number, 7, 2),
        loaded_tokens=loaded,
        computed_tokens=100 - loaded,
        tokens_by_tier={tier: loaded} if tier else {},
        ttft_s=ttft_s,
    )


def make_codec_turn(codec: str) -> TurnReport:
    stored = {"memory": 400 if codec == "raw" else 110, "nvme": 0}
    turn = make_turn(7, tier="memory", ttft_s=0.5)
    return replace(turn, codec=codec, stored_bytes=stored)


def make_result(*turns: TurnReport) -> WorkerResult:
    return WorkerResult(turns, WorkerEnd(history=(1,), held_tokens=99, transport="shm"))


def make_runs() -> Runs:
    tiers = (TierStatistics("memory", 1000, 500, 400, 6),)
    return Runs(
        uninterrupted=make_result(*(make_turn(number) for number in range(1, 9))),
        cold=make_result(make_turn(7), make_turn(8)),
        first=make_result(*(make_turn(number) for number in range(1, 7))),
        memory=make_result(make_turn(7, tier="memory", ttft_s=0.3)),
        nvme=make_result(make_turn(8, tier="nvme", ttft_s=0.4)),
        by_codec=make_result(*(make_codec_turn(codec) for codec in ("raw", "int8"))),
        flush=FlushResult(6, 0),
        tiers_before_kill=tiers,
        tiers_after=tiers,
        restart_s=0.7,
        page_tokens=16,
    )


def changed(result: WorkerResult, **changes: object) -> WorkerResult:
    """The result with its last turn changed."""
    last = replace(result.turns[-1], **changes)  # type: ignore[arg-type]
    return replace(result, turns=(*result.turns[:-1], last))


def test_equal_answers_from_the_right_tiers_are_a_success() -> None:
    verdict = judge(make_runs())
    assert verdict.answers_equal
    assert verdict.problems == ()
    assert verdict.notes == ()


def test_one_other_token_is_a_failure() -> None:
    runs = make_runs()
    for name in ("first", "memory", "nvme"):
        changes: dict[str, Any] = {name: changed(getattr(runs, name), answer_tokens=(9, 7, 3))}
        verdict = judge(replace(runs, **changes))
        assert not verdict.answers_equal
        assert any("differs" in problem for problem in verdict.problems)


def test_a_cold_run_that_differs_is_a_problem_but_not_octavos() -> None:
    runs = make_runs()
    verdict = judge(replace(runs, cold=changed(runs.cold, answer_tokens=(9,))))
    assert verdict.answers_equal
    assert len(verdict.problems) == 1


def test_a_failed_page_is_a_failure() -> None:
    runs = make_runs()
    get = judge(replace(runs, nvme=changed(runs.nvme, get_statuses={"DONE": 5, "CORRUPT": 1})))
    put = judge(replace(runs, first=changed(runs.first, put_statuses={"NO_ROOM": 2})))
    assert get.failed_pages == 1
    assert put.problems == ("2 pages ended as NO_ROOM",)


def test_pages_that_are_not_durable_are_a_failure() -> None:
    assert judge(replace(make_runs(), flush=FlushResult(4, 2))).problems == (
        "2 pages could not be made durable",
    )


def test_pages_from_another_tier_or_too_few_are_a_failure() -> None:
    runs = make_runs()
    other = judge(replace(runs, nvme=changed(runs.nvme, tokens_by_tier={"memory": 96})))
    fewer = judge(replace(runs, memory=changed(runs.memory, tokens_by_tier={"memory": 80})))
    assert "worker C should have found 96 tokens in nvme" in other.problems[0]
    assert "worker B should have found 96 tokens in memory" in fewer.problems[0]


def test_raw_must_answer_equally_and_other_codecs_need_not() -> None:
    runs = make_runs()
    raw, int8 = runs.by_codec.turns
    other = (7, 9, 2, 2)
    packed = replace(runs, by_codec=make_result(raw, replace(int8, answer_tokens=other)))
    assert judge(packed).problems == ()
    assert judge(packed).answers_equal
    figures = summary(packed, judge(packed), 1.0)["codecs"]
    assert figures["raw"]["answer_equal"]
    assert (figures["int8"]["answer_equal"], figures["int8"]["differing_tokens"]) == (False, 2)
    assert figures["int8"]["stored_bytes"] == {"memory": 110, "nvme": 0}
    bits = replace(runs, by_codec=make_result(replace(raw, answer_tokens=other), int8))
    assert not judge(bits).answers_equal
    assert "codec raw" in judge(bits).problems[0]


def test_a_codec_whose_pages_fail_or_are_not_found_is_a_failure() -> None:
    runs = make_runs()
    failing = changed(runs.by_codec, get_statuses={"CORRUPT": 1})
    assert judge(replace(runs, by_codec=failing)).problems == ("1 pages ended as CORRUPT",)
    missing = changed(runs.by_codec, tokens_by_tier={})
    assert "int8 should have found 96" in judge(replace(runs, by_codec=missing)).problems[0]


def test_a_slow_hit_is_noted() -> None:
    runs = make_runs()
    verdict = judge(replace(runs, memory=changed(runs.memory, ttft_s=2.0)))
    assert verdict.problems == ()
    assert "0.50 of cold" in verdict.notes[0]


def test_summary_has_the_figures() -> None:
    runs = make_runs()
    figures = summary(runs, judge(runs), 61.25)
    assert figures["ok"] is True
    assert figures["memory"]["ttft_ratio"] == 0.075
    assert figures["nvme"]["loaded_tokens"] == 96
    assert figures["tiers_after"]["memory"]["page_count"] == 6
