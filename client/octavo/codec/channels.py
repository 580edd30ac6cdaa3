"""K: rows are channels over sixteen tokens, with a byte of scale and a byte of offset.

S comes from the table of scales, eight steps an octave. It is rounded up, so that nothing
overflows, or saturates by more than the margin that ``reach`` allows.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from octavo.codec.elements import E4M3, Elements, Unsigned
from octavo.codec.numbers import NOT_FINITE, OFFSETS, SCALES, SHIFT_UNIT
from octavo.codec.rows import Line, Parameters, Rows
from octavo.codec.scratch import Scratch

_SEARCH_ROUNDS: Final = 64
"""Integer scales tried for a row, from the one that its range calls for on: eight octaves, of
which the rounding of the offset, a sixteenth at most, may cost four."""


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
        mean = _mean_of_16(values)
        offset = self._offset(mean, torch.maximum(highest - mean, mean - lowest))
        shift = _shift_of(offset)
        above, below = highest - shift, lowest - shift
        half_range = torch.maximum(above, -below)
        scales, _offsets = _tables(values.device)
        code = _scale_code(half_range / _REACH, scales)
        unfit = ~torch.isfinite(half_range) | (code == NOT_FINITE)
        code = self._best_of_an_octave(code, above, below)
        return (
            torch.where(unfit, NOT_FINITE, code).to(torch.uint8),
            torch.where(unfit, 0, offset),
        )

    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        step, shift = self._numbers(parameters)
        numbers = scratch.take("numbers", values.shape, torch.float32)
        torch.sub(values, shift, out=numbers).div_(step)
        return _or_zero(self.elements.encode(numbers, scratch), parameters[0])

    def line(self, parameters: Parameters) -> Line:
        step, shift = self._numbers(parameters)
        return Line(step.mul_(self.elements.unit), shift)

    def _numbers(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """S and m."""
        scales, _offsets = _tables(parameters[0].device)
        return _pick(scales, parameters[0].to(torch.int32)), _shift_of(parameters[1])

    def _offset(self, mean: Tensor, half_range: Tensor) -> Tensor:
        """The byte of m."""
        octave = (half_range.view(torch.int32) & 0x7F800000).view(torch.float32)
        unit = (octave / 8).clamp_(min=2.0**-30)
        coarse = (mean / unit).round_().mul_(unit)
        return _SHIFT.encode(coarse.div_(SHIFT_UNIT), Scratch(mean.device))

    def _best_of_an_octave(self, first: Tensor, above: Tensor, below: Tensor) -> Tensor:
        """Of a scale code and the seven behind it, the one that rounds both extremes best."""
        scales, _offsets = _tables(first.device)
        extremes = torch.cat((above, below), 1)
        best, least = first, torch.full_like(above, torch.inf)
        for further in range(8):
            code = (first + further).clamp_(max=NOT_FINITE - 1)
            step = _pick(scales, code)
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


class IntegerChannels(Rows):
    """Integers: value = S * (q + c), with c an integer such that the channel's range is covered.

    q + c is an integer as well: the lattice of representable values is S's multiples, whatever c
    is, and a row that is packed again under another c keeps its values. So only another S could
    move them; ``reach`` is chosen such that the largest magnitude, once rounded, calls for the S
    that rounded it.
    """

    dim = 1
    parameter_dtypes = ("uint8", "uint8")

    def __init__(self, bits: int, reach: float) -> None:
        """``reach``: magnitude up to which q - 2^(bits-1) is used; one more below zero."""
        self.elements = Unsigned(bits)
        self._reach = reach
        self._step_factor = 2.0 ** (10 - bits)  # so that all formats share a table of scales
        self._half = 2 ** (bits - 1)

    def measure(self, values: Tensor, scratch: Scratch) -> Parameters:
        lowest = values.amin(self.dim, keepdim=True)
        highest = values.amax(self.dim, keepdim=True)
        centre = (highest + lowest).div_(2)
        scales, offsets = _tables(values.device)
        # The range has to be reached, and the centre by the offset.
        needed = torch.maximum(
            (highest - lowest) / (2 * self._reach + 1), centre.abs() / float(OFFSETS[-1])
        )
        code = _scale_code(needed / self._step_factor, scales)
        code = torch.where(torch.isfinite(needed), code, NOT_FINITE)
        best, chosen = code, torch.zeros_like(code)
        least = torch.full_like(centre, torch.inf)
        fits = code == NOT_FINITE
        for _ in range(_SEARCH_ROUNDS):
            step = _pick(scales, code).mul_(self._step_factor)
            top, bottom = highest / step, lowest / step
            # From the rounded range, so that the rounded values call for this offset, too.
            offset = _offset_code((top.round() + bottom.round() + 1) / 2)
            number = _pick(offsets, offset)
            above, below = top.sub_(number), bottom.sub_(number)
            cost = self._cost(above, below).mul_(step.square())
            better = (cost < least) & ~fits
            best, chosen = torch.where(better, code, best), torch.where(better, offset, chosen)
            least = torch.where(better, cost, least)
            fits |= torch.maximum(above, -1 - below) <= self._reach
            if fits.all():
                break
            code = torch.where(fits, code, code + 1).clamp_(max=NOT_FINITE)
            fits |= code == NOT_FINITE
        best = torch.where(torch.isfinite(least), best, NOT_FINITE)
        chosen = torch.where(best == NOT_FINITE, 0, chosen)
        return best.to(torch.uint8), chosen.to(torch.uint8)

    def _cost(self, above: Tensor, below: Tensor) -> Tensor:
        """Squared error to be expected of a row, in steps: 1/12 for each of its values, and what
        its extremes miss."""
        largest = self._half - 1
        up = above.round().clamp_(-self._half, largest).sub_(above)
        down = below.round().clamp_(-self._half, largest).sub_(below)
        return up.square_().add_(down.square_()).add_(16 / 12)

    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        step, number = self._numbers(parameters)
        numbers = scratch.take("numbers", values.shape, torch.float32)
        # Rounded before the offset is taken off: the lattice does not know it.
        torch.div(values, step, out=numbers).round_().sub_(number)
        return _or_zero(self.elements.encode(numbers, scratch), parameters[0])

    def line(self, parameters: Parameters) -> Line:
        step, number = self._numbers(parameters)
        return Line(step, number.mul_(step))

    def _numbers(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """S and c."""
        scales, offsets = _tables(parameters[0].device)
        scale, offset = (parameter.to(torch.int32) for parameter in parameters)
        step = _pick(scales, scale).mul_(self._step_factor)
        return step, _pick(offsets, offset).sub_(self._half)


_SHIFT: Final = E4M3()

_REACH: Final = 448.5
"""Magnitude up to which v is used: FP8's largest, and what rounding to bfloat16 may add."""


def _mean_of_16(values: Tensor) -> Tensor:
    """Over the middle dimension of ``[n, 16, width]``, halves added to halves, so that it does
    not depend on how torch would sum."""
    for half in (8, 4, 2, 1):
        values = values[:, :half] + values[:, half:]
    return values / 16


def _or_zero(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes, 0 throughout rows that are not finite: their bytes must be the same every time."""
    finite = scale != NOT_FINITE
    return codes if finite.all() else codes.mul_(finite)


def _shift_of(offset: Tensor) -> Tensor:
    """float32 of offset bytes."""
    shift = torch.empty(offset.shape, dtype=torch.float32, device=offset.device)
    _SHIFT.decode(offset, shift, Scratch(offset.device))
    return shift.mul_(_SHIFT.unit * SHIFT_UNIT)


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
    code = torch.where(magnitude < 16, small, upper.clamp_(0, 127))
    return torch.where((wanted < 0) & (code > 0), code + 128, code)
