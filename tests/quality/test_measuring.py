"""The measurement on a model of three random layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.codec import SINK_TOKENS, codec_by_name, codec_names
from octavo.quality import Measured, QualityError, Text, measure
from octavo.quality.model import Subject, open_subject
from octavo.quality.schemes import CastScheme, Scheme, all_schemes, choose_schemes
from octavo_proto.layout import Layout

PREFIX, SCORE = 64, 24
TEXTS = (
    Text("one", "The quick brown fox looks at the lazy dog, and the dog looks back at it. " * 2),
    Text("two", "Sphinx of black quartz, judge my vow; how vexingly quick daft zebras jump! " * 2),
)


@pytest.fixture(scope="session")
def subject(toy_folder: Path) -> Subject:
    return open_subject(toy_folder, page_tokens=16, token_count=PREFIX + SCORE + 1)


class Spoiling(Scheme):
    """Moves every value a little further away each time, and notes what it is given."""

    name = "spoiling"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        self.seen.append(pages)
        return pages * 1.01

    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        return 7


class Keeping(Scheme):
    """Loses nothing."""

    name = "keeping"

    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        return pages.clone()

    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        return page_count * serving_layout.raw_page_bytes


def run(subject: Subject, *schemes: Scheme, rounds: int = 1) -> Measured:
    return measure(subject, TEXTS, schemes, prefix_tokens=PREFIX, score_tokens=SCORE, rounds=rounds)


def test_kv_that_comes_back_whole_scores_nothing(subject: Subject) -> None:
    result = run(subject, Keeping()).schemes["keeping"]
    assert result.score.kl == 0
    assert result.score.dppl_pct == 0
    assert result.score.top1_pct == 100
    assert result.bytes_ratio == 1
    assert result.score.token_count == SCORE * len(TEXTS)


def test_a_whole_forward_gives_the_same_logits_as_prefill_and_score(subject: Subject) -> None:
    tokens = subject.tokens(TEXTS[0], PREFIX + SCORE)
    with torch.inference_mode():
        whole = subject.model(tokens[None]).logits[0, PREFIX:]
    parts = subject.logits(subject.prefill(tokens[:PREFIX]), tokens[PREFIX:])
    assert torch.allclose(whole, parts, atol=1e-4)


def test_pages_are_the_chain_in_order_keys_before_values(subject: Subject) -> None:
    scheme = Spoiling()
    run(subject, scheme)
    pages = scheme.seen[0]
    layout = subject.layout
    assert pages.shape == (PREFIX // 16, layout.layers, 2, 16, layout.kv_heads, layout.head_dim)
    kv = subject.prefill(subject.tokens(TEXTS[0], PREFIX))
    assert torch.equal(pages[2, 1, 0, 5], kv[1, 0, 2 * 16 + 5])
    assert torch.equal(pages[3, 2, 1, 0], kv[2, 1, 3 * 16])


def test_narrower_casts_score_worse(subject: Subject) -> None:
    found = run(subject, *choose_schemes(("cast_bf16", "cast_e4m3", "cast_e5m2"))).schemes
    kls = [found[name].score.kl for name in ("cast_bf16", "cast_e4m3", "cast_e5m2")]
    assert 0 < kls[0] < kls[1] < kls[2]


def test_every_scheme_keeps_the_first_tokens_of_the_chain(subject: Subject) -> None:
    kv = subject.prefill(subject.tokens(TEXTS[0], PREFIX))
    pages = kv.view(*kv.shape[:2], -1, 16, *kv.shape[3:]).permute(2, 0, 1, 3, 4, 5).contiguous()
    for scheme in all_schemes():
        back = scheme.round_trip(pages, subject.layout)
        assert back.dtype == torch.float32
        assert torch.equal(back[0], pages[0]), scheme.name
        assert not torch.equal(back[1], pages[1]), scheme.name


def test_casts_saturate(subject: Subject) -> None:
    pages = torch.full((2, 1, 2, 16, 1, 4), 1e6)
    back = CastScheme("cast_e4m3").round_trip(pages, subject.layout)
    assert bool((back[0] == 1e6).all())
    assert bool((back[1] == 448).all())


def test_bytes_of_a_cast_count_the_raw_tokens(subject: Subject) -> None:
    layout = subject.serving_layout
    token_bytes = layout.raw_page_bytes // 16
    (cast,) = choose_schemes(("cast_e4m3",))
    assert cast.stored_bytes(layout, 4) == SINK_TOKENS * token_bytes + 48 * token_bytes // 2
    (bf16,) = choose_schemes(("cast_bf16",))
    assert bf16.stored_bytes(layout, 4) == 4 * layout.raw_page_bytes


def test_codecs_go_through_the_bytes_that_a_node_would_hold(subject: Subject) -> None:
    found = run(subject, *choose_schemes(("cast_e4m3", "int8", "int5", "fp8_e4m3"))).schemes
    assert 0 < found["int8"].score.kl < found["int5"].score.kl
    assert found["int8"].score.kl < found["fp8_e4m3"].score.kl < found["cast_e4m3"].score.kl
    layout, page_count = subject.serving_layout, PREFIX // 16
    for name, result in found.items():
        if not name.startswith("cast"):
            packed = codec_by_name(name).unit_bytes(layout, 0)
            expected = (layout.raw_page_bytes + (page_count - 1) * packed) / page_count
            assert result.bytes_ratio == expected / layout.raw_page_bytes


def test_codecs_are_all_there(subject: Subject) -> None:
    packing = set(codec_names()) - {"raw"}
    names = [scheme.name for scheme in all_schemes()]
    assert set(names) == packing | {"cast_bf16", "cast_e5m2", "cast_e4m3"}


def test_rounds_show_decay_and_its_absence(subject: Subject) -> None:
    steady = choose_schemes(("cast_e4m3", "int8"))
    found = run(subject, Spoiling(), Keeping(), *steady, rounds=4).schemes
    assert not found["spoiling"].is_stable
    assert found["spoiling"].score_last.kl > 4 * found["spoiling"].score.kl
    for name in ("keeping", "cast_e4m3", "int8"):
        assert found[name].is_stable
        assert found[name].score_last == found[name].score


def test_reports_count_the_steps(subject: Subject) -> None:
    reported: list[tuple[str, int]] = []
    measure(
        subject,
        TEXTS,
        (Keeping(),),
        prefix_tokens=PREFIX,
        score_tokens=SCORE,
        report=lambda doing, done: reported.append((doing, done)),
    )
    assert reported == [
        ("one: prefill", 0),
        ("one: keeping", 1),
        ("two: prefill", 2),
        ("two: keeping", 3),
    ]


def test_a_short_text_is_named_before_anything_runs(subject: Subject) -> None:
    scheme = Spoiling()
    with pytest.raises(QualityError, match="text short has 9 tokens, 89 are needed"):
        measure(
            subject,
            (*TEXTS, Text("short", "too short")),
            (scheme,),
            prefix_tokens=PREFIX,
            score_tokens=SCORE,
        )
    assert not scheme.seen


def test_models_that_do_not_fit_are_refused(toy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(QualityError, match="no causal model"):
        open_subject(tmp_path, page_tokens=16, token_count=1)
    with pytest.raises(QualityError, match="the model takes 8192"):
        open_subject(toy_folder, page_tokens=16, token_count=8193)
    with pytest.raises(QualityError, match="page_tokens"):
        open_subject(toy_folder, page_tokens=24, token_count=1)


def test_unknown_codecs_are_refused_with_those_that_exist() -> None:
    with pytest.raises(QualityError, match=r"no codec 'int7', known: .*cast_e4m3"):
        choose_schemes(("int7",))
    with pytest.raises(QualityError, match="twice"):
        choose_schemes(("cast_e4m3", "cast_e4m3"))
