"""K: rows are channels over sixteen tokens, with a byte of scale and a byte of offset.

value = S * (v + c): S comes from the table of scales, c is an integer from the table of offsets,
so a channel with a bias of hundreds and one without are coded alike.

For integers, v + c is an integer as well: the lattice of representable values is S's multiples,
whatever the offset, and a row that is packed again under another offset keeps its values. So
only a scale that is found differently could move values; ``reach`` is chosen such that a largest
magnitude, once rounded to its grid, still calls for the scale that rounded it.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Final

import torch
from torch import Tensor

from octavo.codec.elements import Elements, Unsigned
from octavo.codec.numbers import NOT_FINITE, OFFSETS, SCALES
from octavo.codec.rows import Parameters, Rows

_SEARCH_ROUNDS: Final = 24
"""Scales tried for a row; more than six were never seen. The first is exact but for the rounding
of the offset, which is at most a sixteenth of it."""


class ChannelRows(Rows):
    """What FP8 and integers have in common."""

    dim = 1
    parameter_dtypes = ("uint8", "uint8")

    step_factor: float
    """S is the table's scale times this, a power of two."""
    offset_unit: int
    """c is the table's offset times this."""
    reach: float
    """Magnitude up to which v is used."""
    extra: int
    """v reaches as many steps further down than up."""

    def __init__(self, elements: Elements) -> None:
        self.elements = elements

    @abstractmethod
    def _centre(self, values: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
        """What the offset shall be."""

    def measure(self, values: Tensor) -> Parameters:
        lowest = values.amin(self.dim, keepdim=True)
        highest = values.amax(self.dim, keepdim=True)
        centre = self._centre(values, lowest, highest)
        half_range = torch.maximum(highest - centre, centre - lowest)
        scales, offsets = _tables(values.device)
        furthest = float(OFFSETS[-1] * self.offset_unit)
        needed = torch.maximum(half_range / (self.reach + self.extra / 2), centre.abs() / furthest)
        code = _scale_code(needed / self.step_factor, scales)
        finite = torch.isfinite(needed)
        code = torch.where(finite, code, NOT_FINITE)
        for _ in range(_SEARCH_ROUNDS):
            step = _pick(scales, code).mul_(self.step_factor)
            offset = _offset_code((centre / step + self.extra / 2) / self.offset_unit)
            number = _pick(offsets, offset).mul_(self.offset_unit)
            above = (highest / step).sub_(number)
            distance = torch.maximum(above, (number - self.extra).sub_(lowest / step))
            too_far = distance > self.reach
            if not too_far.any():
                break
            more = (torch.log2(distance / self.reach) * 8).ceil_().clamp_(1, 255).to(torch.int32)
            code = torch.where(too_far, code + more, code).clamp_(max=NOT_FINITE)
        else:
            raise AssertionError(f"no scale found in {_SEARCH_ROUNDS} rounds")
        offset = torch.where(code == NOT_FINITE, 0, offset)
        return code.to(torch.uint8), offset.to(torch.uint8)

    def dequantise(self, codes: Tensor, parameters: Parameters, out: Tensor) -> None:
        step, number = self._numbers(parameters)
        unit = self.elements.unit
        self.elements.decode(codes, out)
        out.add_(number.mul_(1 / unit)).mul_(step.mul_(unit))

    def _numbers(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """S, and what to add to a code's number."""
        scales, offsets = _tables(parameters[0].device)
        scale, offset = (parameter.to(torch.int32) for parameter in parameters)
        step = _pick(scales, scale).mul_(self.step_factor)
        return step, _pick(offsets, offset).mul_(self.offset_unit)


class FloatChannels(ChannelRows):
    """FP8 around the channel's mean, to 1/14 of the largest magnitude: finer gains nothing, and
    a coarse offset is seldom found differently."""

    step_factor = 1.0
    offset_unit = 32
    extra = 0

    def __init__(self, elements: Elements, reach: float) -> None:
        super().__init__(elements)
        self.reach = reach

    def _centre(self, values: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
        return values.mean(self.dim, keepdim=True)

    def quantise(self, values: Tensor, parameters: Parameters) -> Tensor:
        step, number = self._numbers(parameters)
        codes = self.elements.encode((values / step).sub_(number))
        return codes.mul_(parameters[0] != NOT_FINITE)


class IntegerChannels(ChannelRows):
    """Integers around the middle of the channel's range."""

    offset_unit = 1
    extra = 1

    def __init__(self, bits: int, reach: float) -> None:
        super().__init__(Unsigned(bits))
        self.reach = reach
        self.step_factor = 2.0 ** (10 - bits)
        self._half = 2 ** (bits - 1)

    def _centre(self, values: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
        return (highest + lowest).div_(2)

    def quantise(self, values: Tensor, parameters: Parameters) -> Tensor:
        step, number = self._numbers(parameters)
        # Rounded before the offset is taken off: the lattice does not know it.
        codes = self.elements.encode((values / step).round_().sub_(number))
        return codes.mul_(parameters[0] != NOT_FINITE)

    def _numbers(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        step, number = super()._numbers(parameters)
        return step, number.sub_(self._half)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Scales by code, NaN at the last; offsets by byte, those from 128 on below zero."""
    scales = torch.tensor([*SCALES, torch.nan], dtype=torch.float32, device=device)
    magnitudes = torch.tensor(OFFSETS, dtype=torch.float32, device=device)
    return scales, torch.cat((magnitudes, -magnitudes))


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """table[index]; index_select is four times faster than indexing."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def _scale_code(needed: Tensor, scales: Tensor) -> Tensor:
    """int32: the first scale that is not below; 255 beyond the last. (A binary search takes ten
    times as long as the logarithm, whose last bits may be off by one code.)"""
    guess = (torch.log2(needed) * 8 + 168).ceil_().clamp_(0, NOT_FINITE)
    code = guess.nan_to_num_(0.0).to(torch.int32)
    code.add_((needed > _pick(scales, code)).to(torch.int32)).clamp_(max=NOT_FINITE)
    below = (code - 1).clamp_(min=0)
    return torch.where(needed <= _pick(scales, below), below, code)


def _offset_code(wanted: Tensor) -> Tensor:
    """int32 bytes of the nearest offsets: integers to 15, then three bits of mantissa."""
    magnitude = wanted.abs()
    bits = magnitude.view(torch.int32)
    upper = bits.add(1 << 19).bitwise_right_shift_(20).sub_(((127 + 4) << 3) - 16)
    small = magnitude.clamp(max=16.0).round_().to(torch.int32)
    code = torch.where(magnitude < 16, small, upper.clamp_(max=127))
    return torch.where((wanted < 0) & (code > 0), code + 128, code)
