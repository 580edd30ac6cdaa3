"""The chats about documents: what is shared, what is new, and how long they get."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.bench.rag.workload import (
    RESERVED_IDS,
    Lengths,
    Workload,
    make_workload,
    zipf_documents,
)

LENGTHS = Lengths(system_tokens=15, document_tokens=80, user_tokens=20, answer_tokens=7)


def small(seed: int = 0) -> Workload:
    return make_workload(LENGTHS, (0, 3, 0), turns=4, vocabulary=5000, seed=seed)


def test_scale_multiplies_every_length() -> None:
    assert Lengths().scaled(0.1) == Lengths(
        system_tokens=150, document_tokens=800, user_tokens=20, answer_tokens=20
    )
    assert Lengths().scaled(1e-9).user_tokens == 1


def test_system_prompt_is_shared_by_all_and_the_document_by_those_who_retrieved_it() -> None:
    first, second, third = small().sessions
    assert [len(each.opening) for each in (first, second, third)] == [95, 95, 95]
    assert first.opening == third.opening
    assert first.opening[:15] == second.opening[:15]
    assert first.opening[15:] != second.opening[15:]


def test_no_two_turns_are_alike() -> None:
    said = [turn for session in small().sessions for turn in session.user_turns]
    assert len(said) == len(set(said)) == small().turn_count == 12


def test_turns_have_the_stated_mean_and_spread() -> None:
    workload = make_workload(LENGTHS, range(100), turns=50, vocabulary=5000, seed=1)
    counts = [len(turn) for session in workload.sessions for turn in session.user_turns]
    assert (min(counts), max(counts)) == (10, 30)
    # 5,000 draws with a deviation of 6.1: the mean lies within 0.4 of 20 but once in a million.
    assert np.mean(counts) == pytest.approx(20, abs=0.4)


def test_same_seed_makes_the_same_sessions_and_another_seed_others() -> None:
    assert small(4) == small(4)
    assert small(4) != small(5)


def test_token_ids_are_in_the_vocabulary_and_are_no_marks() -> None:
    ids = {each for session in small().sessions for each in session.opening}
    assert min(ids) >= RESERVED_IDS
    assert max(ids) < 5000


def test_lengths_at_the_end_count_documents_once() -> None:
    workload = small()
    said = [sum(map(len, session.user_turns)) for session in workload.sessions]
    assert workload.longest_tokens == 15 + 80 + max(said) + 4 * 7
    assert workload.distinct_tokens == 15 + 2 * 80 + sum(said) + 12 * 7


def test_zipf_prefers_the_first_documents_as_its_weights_say() -> None:
    drawn = zipf_documents(60_000, pool=3, exponent=1.0, seed=0)
    shares = np.bincount(drawn, minlength=3) / 60_000
    # Weights 1, 1/2, 1/3 sum to 11/6; a share's deviation is 0.002.
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)


def test_exponent_zero_draws_evenly() -> None:
    shares = np.bincount(zipf_documents(60_000, 4, 0.0, 1), minlength=4) / 60_000
    assert shares == pytest.approx([0.25] * 4, abs=0.01)
