"""Rows of one value, of none, of the largest and the smallest, and of what is no number."""

from __future__ import annotations

import pytest
import torch
from tests.codec.kv import DTYPES, bits, gqa, mla, torch_dtype, units

from octavo.codec import codec_by_name, codec_names

NAMES = codec_names()[1:]


def back(name: str, values: torch.Tensor, layout_dtype: str) -> torch.Tensor:
    layout = gqa(layout_dtype)
    codec = codec_by_name(name)
    return codec.unpack(codec.pack(values, layout), layout, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
class TestRows:
    def test_zeros_come_back_as_zeros(self, name: str, dtype: str) -> None:
        values = torch.zeros_like(units(gqa(dtype), 2))
        assert torch.equal(bits(back(name, values, dtype)), bits(values))
        assert torch.equal(back(name, -values, dtype), values)

    @pytest.mark.parametrize("constant", [1.0, -0.37, 25.0, 380.0, 3000.0, 1e-3])
    def test_constant_rows_come_back_within_the_formats_precision(
        self, name: str, dtype: str, constant: float
    ) -> None:
        values = torch.full_like(units(gqa(dtype), 1), constant)
        relative = 0.13 if name == "fp8_e5m2" else 0.07 if name == "fp8_e4m3" else 0.01
        got = back(name, values, dtype).float()
        assert float((got - values.float()).abs().max()) <= relative * abs(constant) + 2.0**-16

    def test_subnormals_come_back_as_almost_nothing(self, name: str, dtype: str) -> None:
        tiny = torch.finfo(torch_dtype(gqa(dtype))).tiny
        values = (units(gqa(dtype), 1).float().clamp(-1, 1) * tiny / 2).to(torch_dtype(gqa(dtype)))
        got = back(name, values, dtype).float()
        assert float(got.abs().max()) < 2.0**-13

    def test_a_subnormal_beside_ordinary_values_does_no_harm(self, name: str, dtype: str) -> None:
        values = units(gqa(dtype), 1)
        plain = back(name, values, dtype)
        values[0, 0, :, 3] = torch.finfo(values.dtype).tiny / 4
        got = back(name, values, dtype)
        assert float(got[0, 0, :, 3].abs().max()) < 0.1 * float(plain.abs().max())

    @pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
    def test_a_channel_or_token_with_no_number_in_it_is_nan_and_no_other(
        self, name: str, dtype: str, special: float
    ) -> None:
        values = units(gqa(dtype), 2)
        plain = back(name, values, dtype)
        values[1, 0, 0, 5, 1, 3] = special  # a key: its channel over 16 tokens
        values[1, 1, 1, 7, 0, 2] = special  # a value: its token and head
        got = back(name, values, dtype)
        expected = plain.clone()
        expected[1, 0, 0, :, 1, 3] = torch.nan
        expected[1, 1, 1, 7, 0, :] = torch.nan
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_fp16_stays_finite(name: str) -> None:
    values = units(gqa("float16"), 1)
    values[0, :, :, ::5] = 65504.0
    values[0, :, :, 1::5] = -65504.0
    got = back(name, values, "float16")
    assert got.isfinite().all()
    assert float((got.float() - values.float()).abs().max()) <= 0.14 * 65504


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_no_scale_reaches_is_nan_and_not_a_wrong_number(name: str, dtype: str) -> None:
    values = units(gqa(dtype), 1)
    values[0, 0, 0, 4, 1, 6] = 1e30
    values[0, 1, 1, 9, 1, 0] = -1e30
    got = back(name, values, dtype)
    assert got[0, 0, 0, :, 1, 6].isnan().all()
    assert got[0, 1, 1, 9, 1, :].isnan().all()
    assert int(got.isnan().sum()) == 16 + 8


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_scales_of_mla_reach_everything(name: str, dtype: str) -> None:
    layout = mla(dtype)
    values = units(layout, 1)
    values[..., 3] = torch.finfo(values.dtype).max
    codec = codec_by_name(name)
    got = codec.unpack(codec.pack(values, layout), layout, 0)
    assert got.isfinite().all()
    assert torch.equal(got[..., 3], values[..., 3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rotary_elements_keep_every_bit_even_of_nan(dtype: str) -> None:
    layout = mla(dtype, rope_dim=64)
    values = units(layout, 1)
    pattern = torch.arange(16 * 64, dtype=torch.int32).mul(61).to(torch.int16)
    values[0, 0, :, layout.head_dim :] = pattern.view(torch_dtype(layout)).view(16, 64)
    codec = codec_by_name("int8")
    got = codec.unpack(codec.pack(values, layout), layout, 0)
    assert torch.equal(bits(got[..., layout.head_dim :]), bits(values[..., layout.head_dim :]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_outlier_token_costs_other_channels_nothing(name: str, dtype: str) -> None:
    values = units(gqa(dtype), 1)
    plain = back(name, values, dtype)
    values[0, 0, 0, 2, 0, 1] = 500.0
    got = back(name, values, dtype)
    changed = (got != plain).any(3)[0]  # [layer, side, head, channel], over tokens
    changed[0, 0, 0, 1] = False
    assert not changed.any()
