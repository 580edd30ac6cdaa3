"""What had to be computed, with figures worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.bench.rag.rates import (
    RateError,
    Reach,
    ServedTurn,
    compulsory_tokens,
    percentile_ms,
    rates,
    reaches,
)
from octavo.bench.rag.workload import Lengths, make_workload

BLOCK = 4


def turn(
    prompt: Sequence[int],
    answer: Sequence[int] = (90, 91),
    *,
    cached: int = 0,
    at: tuple[float, float, float] = (0.0, 1.0, 2.0),
) -> ServedTurn:
    """``at``: sent, first token, end."""
    issued_s, first_token_s, ended_s = at
    return ServedTurn(
        session=0,
        prompt=prompt,
        answer=answer,
        cached_tokens=cached,
        issued_s=issued_s,
        first_token_s=first_token_s,
        ended_s=ended_s,
    )


def later(start_s: float) -> tuple[float, float, float]:
    return start_s, start_s + 1, start_s + 2


def test_what_nobody_has_seen_is_compulsory() -> None:
    assert reaches([turn(range(10))], BLOCK) == [Reach(0, 0)]
    found = rates([turn(range(10))], BLOCK)
    assert (found.prompt_tokens, found.computed_tokens, found.compulsory_tokens) == (10, 10, 10)
    assert (found.recompute_rate, found.floor, found.redundant) == (1.0, 1.0, 0.0)


def test_only_whole_blocks_are_reused() -> None:
    # Of ten tokens two blocks of four are whole.
    assert reaches([turn(range(10)), turn(range(10), at=later(5))], BLOCK)[1] == Reach(8, 8)


def test_last_token_of_a_prompt_is_always_computed() -> None:
    # Eight tokens are two blocks, and the second one holds the last token.
    assert reaches([turn(range(8)), turn(range(8), at=later(5))], BLOCK)[1] == Reach(4, 4)


def test_answers_are_reused_but_for_their_last_token() -> None:
    first = turn(range(6), [50, 51, 52])
    # 6 + 2 tokens have KV: two blocks. With a token fewer in the answer, only one would be whole.
    next_prompt = [*range(6), 50, 51, 52, 60, 61]
    assert reaches([first, turn(next_prompt, at=later(5))], BLOCK)[1] == Reach(8, 8)
    shorter = turn(range(6), [50, 51])
    next_prompt = [*range(6), 50, 51, 60, 61]
    assert reaches([shorter, turn(next_prompt, at=later(5))], BLOCK)[1] == Reach(4, 4)


def test_a_block_counts_only_behind_the_same_blocks() -> None:
    first = turn([1, 2, 3, 4, 5, 6, 7, 8, 9])
    moved = turn([0, 0, 0, 0, 5, 6, 7, 8, 9], at=later(5))
    assert reaches([first, moved], BLOCK)[1] == Reach(0, 0)


def test_prompt_is_there_from_its_first_token_on_and_the_answer_from_its_end_on() -> None:
    first = turn(range(5), [50, 51, 52, 53], at=(0.0, 1.0, 2.0))
    prompt = [*range(5), 50, 51, 52, 53, 54]
    assert reaches([first, turn(prompt, at=later(0.5))], BLOCK)[1] == Reach(8, 0)
    assert reaches([first, turn(prompt, at=later(1.0))], BLOCK)[1] == Reach(8, 4)
    assert reaches([first, turn(prompt, at=later(2.0))], BLOCK)[1] == Reach(8, 8)


def test_first_to_have_computed_a_block_counts() -> None:
    slow = turn(range(9), at=(0.0, 9.0, 10.0))
    fast = turn(range(9), at=(1.0, 2.0, 3.0))
    assert reaches([slow, fast, turn(range(9), at=later(4))], BLOCK)[1:] == [
        Reach(8, 0),
        Reach(8, 8),
    ]


def test_what_two_compute_at_the_same_time_is_compulsory_for_both() -> None:
    both = [turn(range(10)), turn(range(10), at=(0.5, 1.5, 2.5))]
    found = rates(both, BLOCK)
    assert (found.floor, found.floor_alone, found.redundant) == (1.0, 12 / 20, 0.0)


def test_what_one_takes_from_another_that_still_computes_it_is_not() -> None:
    both = [turn(range(10)), turn(range(10), cached=4, at=(0.5, 1.5, 2.5))]
    found = rates(both, BLOCK)
    # 10 + 6 were computed, and the second may not be praised for the four that it reused.
    assert (found.computed_tokens, found.compulsory_tokens) == (16, 16)


def test_redundant_is_the_share_of_what_could_have_been_reused() -> None:
    first = turn(range(10))
    again = turn(range(10), cached=4, at=later(5))
    found = rates([first, again], BLOCK)
    # 20 tokens, 12 compulsory, 16 computed.
    assert (found.recompute_rate, found.floor, found.redundant) == (0.8, 0.6, 0.5)


def test_without_any_cache_everything_avoidable_is_redundant() -> None:
    assert rates([turn(range(10)), turn(range(10), at=later(5))], BLOCK).redundant == 1.0


def test_loads_that_failed_were_computed() -> None:
    pair = [turn(range(10)), turn(range(10), cached=8, at=later(5))]
    assert rates(pair, BLOCK).redundant == 0.0
    assert rates(pair, BLOCK, failed_tokens=4).redundant == 0.5


def test_engine_that_reused_what_nobody_had_seen_is_not_believed() -> None:
    with pytest.raises(RateError, match="only 8 had been seen"):
        compulsory_tokens(turn(range(10), cached=9), Reach(8, 8))


@pytest.mark.parametrize(("repeat", "published"), [(0.0, 0.144), (0.5, 0.082), (0.67, 0.060)])
def test_floor_at_full_length_is_the_published_one(repeat: float, published: float) -> None:
    sessions = 100
    new = round(sessions * (1 - repeat))
    documents = [min(place, new - 1) for place in range(sessions)]
    lengths = Lengths()
    workload = make_workload(lengths, documents, turns=6, vocabulary=100_000, seed=3)
    served: list[ServedTurn] = []
    for session in workload.sessions:
        said = list(session.opening)
        for user_turn in session.user_turns:
            said += user_turn
            place = len(served)
            answer = [100_000 + place] * lengths.answer_tokens
            served.append(turn(tuple(said), answer, at=later(3.0 * place)))
            said += answer
    found = rates(served, block_tokens=16)
    assert found.floor == pytest.approx(published, abs=0.001)
    assert found.floor == found.floor_alone
    assert found.redundant == 1.0


def test_percentiles_are_between_measurements() -> None:
    assert percentile_ms([0.1, 0.2, 0.3, 0.4], 50) == pytest.approx(250)
    assert percentile_ms([0.1, 0.2, 0.3], 90) == pytest.approx(280)
