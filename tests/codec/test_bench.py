"""What ``octavo bench codec`` shows. Errors are seeded, so they are checked; speeds are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from octavo.bench import codec as bench
from octavo.bench.codec_inputs import (
    BIAS,
    KINDS,
    OUTLIERS,
    attention_inputs,
    centred_error,
    rotated,
)
from octavo.cli.bench import show_figures
from octavo.codec import codec_names


@pytest.fixture(scope="module")
def figures() -> Mapping[str, Any]:
    threads = torch.get_num_threads()
    try:
        return bench.run(pairs=1, pages=2)
    finally:
        torch.set_num_threads(threads)


def test_every_codec_and_both_casts_have_every_figure(figures: Mapping[str, Any]) -> None:
    codecs = figures["codecs"]
    assert list(codecs) == [*codec_names(), "cast_e5m2", "cast_e4m3"]
    for name, row in codecs.items():
        speeds = {"pack_gbps", "unpack_gbps", "unpack_ratio"}
        assert set(row) == {"bytes_ratio", *KINDS} | (set() if "cast" in name else speeds)
        assert all(set(row[kind]) == {"k_centred_error", "attention_error"} for kind in KINDS)
    assert figures["torch_cast_gbps"] > 0


def test_figures_are_one_json_object(
    figures: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    show_figures("bench codec", figures, as_json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["head_dim"] == 128


def test_bytes_are_within_their_bounds(figures: Mapping[str, Any]) -> None:
    ratios = {name: row["bytes_ratio"] for name, row in figures["codecs"].items()}
    assert ratios["raw"] == 1
    assert max(ratios["fp8_e5m2"], ratios["fp8_e4m3"], ratios["int8"]) <= 0.55
    assert ratios["int6"] <= 0.42
    assert ratios["int5"] <= 0.36


def test_a_key_bias_breaks_plain_casts_and_no_codec(figures: Mapping[str, Any]) -> None:
    errors = {name: row["bias"]["k_centred_error"] for name, row in figures["codecs"].items()}
    assert errors["fp8_e4m3"] <= errors["cast_e4m3"] / 4
    assert errors["fp8_e5m2"] <= errors["cast_e5m2"] / 4
    for name in codec_names():
        assert errors[name] <= 1.2 * figures["codecs"][name]["benign"]["k_centred_error"]


def test_integers_beat_fp8_at_the_same_bytes(figures: Mapping[str, Any]) -> None:
    for kind in KINDS:
        for error in ("k_centred_error", "attention_error"):
            row = {name: figures["codecs"][name][kind][error] for name in codec_names()}
            assert row["raw"] == 0
            assert row["int8"] < row["int6"] < row["int5"]
            assert row["int8"] < row["fp8_e4m3"] / 3 < row["fp8_e5m2"] / 3


def test_inputs_are_seeded_and_as_described() -> None:
    for kind in KINDS:
        assert torch.equal(attention_inputs(kind).keys, attention_inputs(kind).keys)
    sizes = attention_inputs("outlier").keys.float().pow(2).mean((0, 1)).sqrt()
    turned = sizes.view(2, 64).pow(2).sum(0).sqrt()  # a rotation mixes a channel and its partner
    assert all(float(turned[channel % 64]) > 10 for channel in OUTLIERS)
    assert float(turned.median()) < 2
    biased = attention_inputs("bias").keys.float()
    for channel in (62, 60):  # whose rotation is slow
        assert float(biased[..., channel].mean()) == pytest.approx(BIAS[channel], rel=0.02)
    with pytest.raises(ValueError, match="benign"):
        attention_inputs("odd")


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone() -> None:
    vectors = torch.randn((2, 1, 128), generator=torch.Generator().manual_seed(1))
    key, query = vectors[:1], vectors[1:]
    assert float(rotated(key, 17).square().sum()) == pytest.approx(
        float(key.square().sum()), rel=1e-5
    )
    near = (rotated(key, 3) * rotated(query, 10)).sum()
    far = (rotated(key, 503) * rotated(query, 510)).sum()
    assert float(near) == pytest.approx(float(far), abs=1e-3)


def test_an_offset_that_all_keys_share_is_no_error() -> None:
    keys = torch.randn((2, 64, 128), generator=torch.Generator().manual_seed(1))
    assert centred_error(keys + 3, keys) < 1e-6
    assert centred_error(keys * 1.1, keys) == pytest.approx(0.1, rel=1e-4)
