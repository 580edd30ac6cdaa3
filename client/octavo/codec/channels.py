"""K in FP8: rows are channels over sixteen tokens, with a byte of scale and a byte of offset.

S comes from the table of scales, eight steps an octave. It is rounded up, so that nothing
saturates by more than a margin.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from octavo.codec.elements import E4M3, Elements
from octavo.codec.numbers import NOT_FINITE, SCALES, SHIFT_UNIT
from octavo.codec.rows import Line, Parameters, Rows
from octavo.codec.scratch import Scratch
from octavo.codec.tables import first_code, or_zero, pick, sum_of_16


class FloatChannels(Rows):
    """FP8: value = S * v + m, with m eight times an e4m3 number near the channel's mean: up to
    3,584, above the strongest key biases.

    FP8's precision does not depend on S, so of the eight scales of an octave the one is taken
    that meets the channel's two extremes best: on a real model their error decides (KL is half
    of what the smallest scale gives, and that of a scale in full precision).

    m is near the mean, not nearest: it is rounded to an eighth of the range's octave before, so
    that rounded values seldom have another.
    """

    dim = 1
    parameter_dtypes = ("uint8", "uint8")

    def __init__(self, elements: Elements) -> None:
        self.elements = elements

    def measure(self, values: Tensor, scratch: Scratch) -> Parameters:
        lowest = values.amin(self.dim, keepdim=True)
        highest = values.amax(self.dim, keepdim=True)
        mean = sum_of_16(values) / 16
        offset = self._offset(mean, torch.maximum(highest - mean, mean - lowest))
        shift = _shift_of(offset)
        above, below = highest - shift, lowest - shift
        half_range = torch.maximum(above, -below)
        scales = _table(values.device)
        needed = half_range / _REACH
        code = first_code(needed, (torch.log2(needed) * 8 + 168).ceil_(), scales)
        unfit = code == NOT_FINITE
        code = self._best_of_an_octave(code, above, below)
        return (
            torch.where(unfit, NOT_FINITE, code).to(torch.uint8),
            torch.where(unfit, 0, offset),
        )

    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        step, shift = self._numbers(parameters)
        numbers = scratch.take("numbers", values.shape, torch.float32)
        torch.sub(values, shift, out=numbers).div_(step)
        return or_zero(self.elements.encode(numbers, scratch), parameters[0])

    def line(self, parameters: Parameters) -> Line:
        step, shift = self._numbers(parameters)
        return Line(step.mul_(self.elements.unit), shift)

    def _numbers(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """S and m."""
        scales = _table(parameters[0].device)
        return pick(scales, parameters[0].to(torch.int32)), _shift_of(parameters[1])

    def _offset(self, mean: Tensor, half_range: Tensor) -> Tensor:
        """The byte of m."""
        octave = (half_range.view(torch.int32) & 0x7F800000).view(torch.float32)
        unit = (octave / 8).clamp_(min=2.0**-30)
        coarse = (mean / unit).round_().mul_(unit)
        return _SHIFT.encode(coarse.div_(SHIFT_UNIT), Scratch(mean.device))

    def _best_of_an_octave(self, first: Tensor, above: Tensor, below: Tensor) -> Tensor:
        """Of a scale code and the seven behind it, the one that rounds both extremes best."""
        scales = _table(first.device)
        extremes = torch.cat((above, below), 1)
        best, least = first, torch.full_like(above, torch.inf)
        for further in range(8):
            code = (first + further).clamp_(max=NOT_FINITE - 1)
            step = pick(scales, code)
            error = (self._rounded(extremes / step) * step).sub_(extremes)
            error = error.square_().sum(1, keepdim=True)
            better = error < least
            best, least = torch.where(better, code, best), torch.where(better, error, least)
        return best

    def _rounded(self, numbers: Tensor) -> Tensor:
        scratch = Scratch(numbers.device)
        out = torch.empty_like(numbers)
        self.elements.decode(self.elements.encode(numbers, scratch), out, scratch)
        return out.mul_(self.elements.unit)


_SHIFT: Final = E4M3()

_REACH: Final = 448.5
"""Magnitude up to which v is used: FP8's largest, and what rounding to bfloat16 may add."""


def _shift_of(offset: Tensor) -> Tensor:
    """float32 of offset bytes."""
    shift = torch.empty(offset.shape, dtype=torch.float32, device=offset.device)
    _SHIFT.decode(offset, shift, Scratch(offset.device))
    return shift.mul_(_SHIFT.unit * SHIFT_UNIT)


@cache
def _table(device: torch.device) -> Tensor:
    """Scales by code, NaN at the last."""
    return torch.tensor([*SCALES, torch.nan], dtype=torch.float32, device=device)
