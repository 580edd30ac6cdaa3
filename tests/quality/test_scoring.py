"""Scores of distributions that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.quality.figures import rounded
from octavo.quality.scoring import ROWS_AT_ONCE, Score, compare


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_equal_distributions_score_nothing() -> None:
    logits = logits_of([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])
    score = compare(logits, logits, torch.tensor([0, 1]))
    assert (score.kl, score.dppl_pct, score.top1_pct) == (0, 0, 100)


def test_scores_are_those_of_the_definitions() -> None:
    reference = logits_of([0.5, 0.5], [0.9, 0.1])
    candidate = logits_of([0.25, 0.75], [0.6, 0.4])
    score = compare(reference, candidate, torch.tensor([0, 0]))
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert score.kl == pytest.approx((first + second) / 2)
    # Perplexity is the inverse geometric mean of what the text's own tokens were given.
    assert score.dppl_pct == pytest.approx(100 * (math.sqrt(0.5 * 0.9 / (0.25 * 0.6)) - 1))


def test_divergence_is_taken_from_the_reference() -> None:
    reference, candidate = logits_of([0.99, 0.01]), logits_of([0.5, 0.5])
    target = torch.tensor([0])
    forward = compare(reference, candidate, target).kl
    assert forward == pytest.approx(0.99 * math.log(1.98) + 0.01 * math.log(0.02))
    assert forward != pytest.approx(compare(candidate, reference, target).kl)


def test_a_constant_added_to_logits_changes_nothing() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    score = compare(logits, logits + 3, torch.zeros(5, dtype=torch.int64))
    assert abs(score.kl) < 1e-8


def test_small_divergences_survive_cancellation() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(200, 1000, generator=generator) * 3
    noise = torch.randn(200, 1000, generator=generator) * 1e-3
    # To second order, KL is half the variance of the logits' change under the reference.
    weights = logits.double().softmax(-1)
    change = noise.double()
    mean = (weights * change).sum(-1, keepdim=True)
    expected = 0.5 * (weights * (change - mean) ** 2).sum(-1).mean()
    score = compare(logits, (logits.double() + change), torch.zeros(200, dtype=torch.int64))
    assert score.kl == pytest.approx(float(expected), rel=0.01)


def test_a_model_that_breaks_outright_is_told_as_such() -> None:
    reference = torch.zeros(1, 2)
    broken = compare(reference, torch.tensor([[-1e4, 0.0]]), torch.tensor([0]))
    assert broken.dppl_pct == math.inf
    assert rounded(broken.dppl_pct) is None
    assert rounded(compare(reference, reference * math.nan, torch.tensor([0])).kl) is None


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(1, 3 * ROWS_AT_ONCE), st.integers(0, 3 * ROWS_AT_ONCE))
def test_scores_of_parts_add_up_to_the_whole(count: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(count)
    reference = torch.randn(count, 7, generator=generator)
    candidate = reference + torch.randn(count, 7, generator=generator) / 5
    targets = torch.randint(0, 7, (count,), generator=generator)
    cut = min(cut, count)
    parts = [
        compare(reference[rows], candidate[rows], targets[rows])
        for rows in (slice(0, cut), slice(cut, count))
    ]
    whole, joined = compare(reference, candidate, targets), sum(parts, Score())
    assert joined.token_count == whole.token_count == count
    assert joined.same_top1 == whole.same_top1
    assert joined.kl == pytest.approx(whole.kl)
    assert joined.dppl_pct == pytest.approx(whole.dppl_pct)
