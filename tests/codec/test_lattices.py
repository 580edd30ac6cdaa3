"""The lattice K's integers are put on, beside scales and zeros in full precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.codec.integer_channels import IntegerChannels
from octavo.codec.numbers import INTEGER_SCALES, NOT_FINITE, OFFSETS
from octavo.codec.scratch import Scratch

BITS = (8, 6, 5)


def keys(bias: float, *, spread: float = 1.0, seed: int = 0) -> Tensor:
    """``[groups, 16, channels]``, each channel with a mean of its own."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn((1, 1, 256), generator=generator) * bias
    return torch.randn((16, 16, 256), generator=generator) * spread + means


def parameters(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    scale, offset = IntegerChannels(bits).measure(values, Scratch(values.device))
    return scale, offset


def back(values: Tensor, bits: int) -> Tensor:
    rows, scratch = IntegerChannels(bits), Scratch(values.device)
    found = rows.measure(values, scratch)
    out = torch.empty_like(values)
    rows.dequantise(rows.quantise(values, found, scratch), rows.line(found), out, scratch)
    return out


def of_exact_scales(values: Tensor, bits: int) -> Tensor:
    """From the smallest value to the largest in 2^bits - 1 steps."""
    lowest, highest = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    step = (highest - lowest) / (2**bits - 1)
    levels: Tensor = ((values - lowest) / step).round()
    return torch.addcmul(lowest, levels, step)


def squared(error: Tensor) -> float:
    return float(error.square().sum())


@pytest.mark.parametrize("bias", [0.0, 1.0, 3.0])
def test_two_bytes_lose_hardly_more_than_exact_scales(bias: float) -> None:
    values = keys(bias)
    for bits, most in ((8, 1.5), (6, 1.1), (5, 1.03)):
        exact = squared(of_exact_scales(values, bits) - values)
        assert squared(back(values, bits) - values) <= most * exact


@pytest.mark.parametrize("bits", [6, 5])  # with 8 an offset is no fraction of a step
def test_extremes_are_met_better_than_the_others(bits: int) -> None:
    values = keys(1.0)
    error = (back(values, bits) - values).square()
    extreme = (values == values.amin(1, keepdim=True)) | (values == values.amax(1, keepdim=True))
    assert float(error[extreme].mean()) < float(error[~extreme].mean()) / 2


@pytest.mark.parametrize("bits", BITS)
def test_a_mean_of_a_hundred_spreads_costs_little(bits: int) -> None:
    values = keys(0.0) + 100.0
    near, far = (
        squared(back(values - 100, bits) - values + 100),
        squared(back(values, bits) - values),
    )
    assert far <= 4 * near


@pytest.mark.parametrize("bits", BITS)
def test_nearly_every_lattice_is_found_again(bits: int) -> None:
    once = back(keys(1.0), bits)
    assert float((back(once, bits) != once).any(1).float().mean()) < 0.02


@pytest.mark.parametrize("bits", BITS)
def test_keys_scaled_by_powers_of_two_get_the_same_lattice(bits: int) -> None:
    """As far as the fine scales go: 24 codes are an octave."""
    values = keys(0.5)
    scale, offset = parameters(values, bits)
    doubled = parameters(values * 2, bits)
    assert torch.equal(doubled[0], scale + 24)
    assert torch.equal(doubled[1], offset)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [2.0**-30, 2.0**-9, 1.0, 50.0, 1e3, 6e4])
def test_rows_of_every_size_are_within_half_a_step(bits: int, size: float) -> None:
    values = keys(0.0, spread=1.0)
    values = values / values.abs().amax() * size
    scale, _offset = parameters(values, bits)
    assert int(scale.max()) < NOT_FINITE
    step = torch.tensor([*INTEGER_SCALES])[scale.long()] * 2.0 ** (10 - bits)
    error = (back(values, bits) - values).abs()
    assert bool((error <= step * 0.501).all())


def test_scales_and_offsets_ascend_to_their_bounds() -> None:
    assert list(INTEGER_SCALES) == sorted(set(INTEGER_SCALES))
    assert (INTEGER_SCALES[0], INTEGER_SCALES[16], INTEGER_SCALES[208]) == (
        2.0**-20, 2.0**-12, 2.0**-4,
    )  # fmt: skip
    assert INTEGER_SCALES[-1] == 181.0
    assert list(OFFSETS) == sorted(set(OFFSETS))
    assert (OFFSETS[63], OFFSETS[64], OFFSETS[80], OFFSETS[-1]) == (63, 64, 128, 7680)
