"""Bytes that the codecs say, against the formats written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.plan.codec_bytes import CODECS, FIRST_PAGE, has_codec, unit_bytes
from octavo_proto.layout import KvKind, Layout

HEAD = Layout(name="head", model="m", layers=1, kv_heads=1, head_dim=128)
MLA = Layout(
    name="mla", model="m", kind=KvKind.MLA, layers=1, kv_heads=1, head_dim=512, rope_dim=64
)


@pytest.mark.parametrize(
    ("codec", "size_bytes"),
    [
        ("raw", 16 * 128 * 2 * 2),
        # K: values, scale and shift a channel. V: values, an fp16 scale (and zero) a token.
        ("fp8_e5m2", (2048 + 128 + 128) + (2048 + 16 * 2)),
        ("fp8_e4m3", (2048 + 128 + 128) + (2048 + 16 * 2)),
        ("int8", (2048 + 128 + 128) + (2048 + 16 * 2 + 16 * 2)),
        ("int6", (1536 + 128 + 128) + (1536 + 16 * 2 + 16 * 2)),
        ("int5", (1280 + 128 + 128) + (1280 + 16 * 2 + 16 * 2)),
    ],
)
def test_bytes_of_a_page_of_one_head(codec: str, size_bytes: int) -> None:
    assert unit_bytes(codec, HEAD, 0) == size_bytes


@pytest.mark.parametrize(
    ("codec", "ratio_max"), [("fp8_e4m3", 0.55), ("int8", 0.55), ("int6", 0.42), ("int5", 0.36)]
)
def test_ratios_that_were_promised(codec: str, ratio_max: float) -> None:
    assert unit_bytes(codec, HEAD, 0) / unit_bytes("raw", HEAD, 0) <= ratio_max


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8"])
def test_latents_take_656_bytes_a_token_and_layer(codec: str) -> None:
    assert unit_bytes(codec, MLA, 0) == 16 * 656


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", [HEAD, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("page_tokens", [16, 32, 256])
def test_first_page_has_16_exact_tokens(codec: str, layout: Layout, page_tokens: int) -> None:
    page = replace(layout, page_tokens=page_tokens)
    exact, packed = unit_bytes("raw", layout, 0), unit_bytes(codec, layout, 0)
    assert unit_bytes(codec, page, 0, FIRST_PAGE) == exact + (page_tokens // 16 - 1) * packed
    assert unit_bytes(codec, page, 0) == page_tokens // 16 * packed


@pytest.mark.parametrize("codec", CODECS)
def test_units_add_up_to_the_page(codec: str) -> None:
    whole = replace(HEAD, layers=7, kv_heads=6)
    cut = replace(whole, layer_parts=3, head_parts=4)
    parts = [unit_bytes(codec, cut, unit) for unit in range(cut.unit_count)]
    assert sum(parts) == unit_bytes(codec, whole, 0) == 42 * unit_bytes(codec, HEAD, 0)


def test_kv_that_is_in_8_bits_already_stays_raw() -> None:
    layout = replace(HEAD, dtype="float8_e4m3fn")
    assert [codec for codec in CODECS if has_codec(codec, layout)] == ["raw"]
