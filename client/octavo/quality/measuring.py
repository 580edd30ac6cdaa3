"""The measurement: one prefill a text, then each scheme on that same KV."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.quality.model import Subject
from octavo.quality.schemes import Scheme
from octavo.quality.scoring import Score, compare
from octavo.quality.texts import Text


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """What one scheme did to all texts."""

    by_text: Mapping[str, Score]
    bytes_ratio: float
    """Bytes of the prefix's pages, the raw first one included, over those of an engine."""
    by_text_last: Mapping[str, Score]
    """After the last round of packing and unpacking; the same as ``by_text`` with one round."""
    is_stable: bool
    """Whether the last round's KV is that of the first, bit for bit, in every text."""

    @property
    def score(self) -> Score:
        """Over all texts, after one round."""
        return sum(self.by_text.values(), Score())

    @property
    def score_last(self) -> Score:
        """Over all texts, after the last round."""
        return sum(self.by_text_last.values(), Score())


@dataclass(frozen=True, slots=True)
class Measured:
    """All schemes, in the order asked for."""

    schemes: Mapping[str, SchemeResult]
    prefix_tokens: int
    score_tokens: int
    rounds: int


def step_count(texts: Sequence[Text], schemes: Sequence[Scheme]) -> int:
    """Steps of ``measure``: a prefill a text, and every scheme on it."""
    return len(texts) * (1 + len(schemes))


def measure(
    subject: Subject,
    texts: Sequence[Text],
    schemes: Sequence[Scheme],
    *,
    prefix_tokens: int,
    score_tokens: int,
    rounds: int = 1,
    report: Callable[[str, int], None] = lambda _doing, _steps_done: None,
) -> Measured:
    """Runs everything. ``prefix_tokens`` must be a multiple of the layout's page.

    ``report`` is told what begins now, and how many steps lie behind.

    Raises:
        QualityError: a text is too short; found out before anything is computed.
    """
    # One token more than is fed: the last distribution has a token to be scored by, too.
    token_count = prefix_tokens + score_tokens + 1
    tokens_of = {text.name: subject.tokens(text, token_count) for text in texts}
    first: dict[str, dict[str, Score]] = {scheme.name: {} for scheme in schemes}
    last: dict[str, dict[str, Score]] = {scheme.name: {} for scheme in schemes}
    stable = {scheme.name: True for scheme in schemes}
    done = itertools.count()
    for name, tokens in tokens_of.items():
        fed, targets = tokens[prefix_tokens:-1], tokens[prefix_tokens + 1 :]
        report(f"{name}: prefill", next(done))
        kv = subject.prefill(tokens[:prefix_tokens])
        reference = subject.logits(kv, fed)
        for scheme in schemes:
            report(f"{name}: {scheme.name}", next(done))
            once = _round_trip(scheme, kv, subject)
            score = compare(reference, subject.logits(once, fed), targets)
            often = once
            for _ in range(rounds - 1):
                often = _round_trip(scheme, often, subject)
            is_stable = _same_bits(once, often)
            first[scheme.name][name] = score
            last[scheme.name][name] = (
                score if is_stable else compare(reference, subject.logits(often, fed), targets)
            )
            stable[scheme.name] &= is_stable
    serving_bytes = subject.serving_layout.raw_page_bytes
    page_count = prefix_tokens // subject.layout.page_tokens
    return Measured(
        {
            scheme.name: SchemeResult(
                by_text=first[scheme.name],
                bytes_ratio=scheme.stored_bytes(subject.serving_layout, page_count)
                / (page_count * serving_bytes),
                by_text_last=last[scheme.name],
                is_stable=stable[scheme.name],
            )
            for scheme in schemes
        },
        prefix_tokens,
        score_tokens,
        rounds,
    )


def _round_trip(scheme: Scheme, kv: Tensor, subject: Subject) -> Tensor:
    """KV ``[layer, 2, token, head, head_dim]`` through a scheme, page by page of the chain."""
    layers, sides, tokens, heads, head_dim = kv.shape
    size = subject.layout.page_tokens
    paged = kv.view(layers, sides, tokens // size, size, heads, head_dim)
    pages = paged.permute(2, 0, 1, 3, 4, 5).contiguous()
    back = scheme.round_trip(pages, subject.layout)
    return back.permute(1, 2, 0, 3, 4, 5).reshape(kv.shape)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
