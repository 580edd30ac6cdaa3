"""A page that is evicted and saved again, over and over, stays what it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.kv import bits, gqa, layouts, torch_dtype, unit_tensors, units

from octavo import Layout
from octavo.codec import codec_names, codec_of, variants
from octavo.codec.base import unit_shape

FUZZ = settings(max_examples=150, deadline=None, derandomize=True)
PACKED = [variant for variant in variants() if variant != 1]


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", codec_names()[1:])
def test_packing_again_gives_the_same_bytes_whatever_the_values(
    name: str, data: st.DataObject
) -> None:
    layout = data.draw(layouts())
    values = data.draw(unit_tensors(layout))
    variant = data.draw(
        st.sampled_from(
            [v for v in PACKED if codec_of(v).name == name and (v < 32 or layout.page_tokens > 16)]
        )
    )
    codec = codec_of(variant)
    packed = codec.pack(values, layout)
    unpacked = codec.unpack(packed, layout, 0)
    assert torch.equal(codec.pack(unpacked, layout), packed)
    assert torch.equal(bits(codec.unpack(packed, layout, 0)), bits(unpacked))


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", codec_names()[1:])
def test_what_is_not_a_number_never_becomes_one_and_stays_in_its_row(
    name: str, data: st.DataObject
) -> None:
    """K's rows are channels of 16 tokens, V's a token's head, MLA's a token's tile."""
    layout = data.draw(layouts())
    values = data.draw(unit_tensors(layout))
    codec = next(codec_of(variant) for variant in PACKED if codec_of(variant).name == name)
    got = codec.unpack(codec.pack(values, layout), layout, 0)
    tame = values.float().abs() < 65504  # within the reach of every scale
    assert not got[~values.isfinite() & _is_packed(layout, values)].isfinite().any()
    assert got[_whole_rows(layout, tame)].isfinite().all()


def _is_packed(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """Not MLA's rotary part, which is raw."""
    packed = torch.ones_like(values, dtype=torch.bool)
    if layout.name == "mla":
        packed[..., layout.head_dim :] = False
    return packed


def _whole_rows(layout: Layout, good: torch.Tensor) -> torch.Tensor:
    """Elements all of whose row are good."""
    whole = good.clone()
    if layout.name == "mla":
        for begin in range(0, layout.head_dim, 128):
            end = min(begin + 128, layout.head_dim)
            whole[..., begin:end] = good[..., begin:end].all(-1, keepdim=True)
        return whole
    for begin in range(0, layout.page_tokens, 16):
        group = good[:, :, 0, begin : begin + 16]
        whole[:, :, 0, begin : begin + 16] = group.all(2, keepdim=True)
    whole[:, :, 1] = good[:, :, 1].all(-1, keepdim=True)
    return whole


@pytest.mark.parametrize("variant", PACKED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ten_rounds_cost_what_one_costs(variant: int, dtype: str) -> None:
    """Ordinary keys with a bias on some channels, at full width: nothing at all may move."""
    layout = gqa(dtype, head_dim=128, page_tokens=32, layers=4)
    codec = codec_of(variant)
    values = units(layout, 4, bias=20)
    once = codec.unpack(codec.pack(values, layout), layout, 0)
    again = once
    for _ in range(9):
        again = codec.unpack(codec.pack(again, layout), layout, 0)
    assert torch.equal(bits(again), bits(once))


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", codec_names()[1:])
def test_errors_stay_within_a_step_of_the_row(name: str, data: st.DataObject) -> None:
    """Of ordinary values, relative to their row's range: 2^-bits, or FP8's own precision."""
    layout = data.draw(layouts())
    seed = data.draw(st.integers(0, 1000))
    values = units(layout, 2, seed=seed, bias=data.draw(st.sampled_from([0.0, 1.0, 10.0])))
    codec = next(codec_of(variant) for variant in PACKED if codec_of(variant).name == name)
    got = codec.unpack(codec.pack(values, layout), layout, 0)
    assert got.shape == (2, *unit_shape(layout, 0))
    assert got.dtype == torch_dtype(layout)
    relative = {"fp8_e5m2": 0.14, "fp8_e4m3": 0.07, "int8": 0.012, "int6": 0.05, "int5": 0.1}
    limit = relative[name] * max(float(values.float().abs().max()), 1e-6)
    assert float((got.float() - values.float()).abs().max()) <= limit
