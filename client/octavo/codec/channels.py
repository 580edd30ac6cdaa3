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

_SEARCH_ROUNDS: Final = 24
"""Scales tried for a row; more than six were never seen. The first is exact but for the rounding
of the offset, which is at most a sixteenth of it."""


class FloatChannels(Rows):
    """FP8: value = S * v + m, with m the number nearest to the channel's median of those that are
    eight times an e4m3 number: up to 3,584, above the strongest key biases.

    The median (the 8th smallest of 16) serves as well as the mean, and rounding keeps the order
    of values, so it is known where it goes: ``quantise`` keeps numbers that would round to the
    same m within that cell. So m is found again, and with it S.
    """

    dim = 1
    parameter_dtypes = ("uint8", "uint8")

    def __init__(self, elements: Elements, reach: float) -> None:
        """``reach``: magnitude up to which v is used."""
        self.elements = elements
        self._reach = reach

    def measure(self, values: Tensor, scratch: Scratch) -> Parameters:
        lowest = values.amin(self.dim, keepdim=True)
        highest = values.amax(self.dim, keepdim=True)
        middle = _median_of_16(values, scratch)
        offset = _SHIFT.encode(middle / SHIFT_UNIT, Scratch(values.device))
        shift = _shift_of(offset)
        half_range = torch.maximum(highest - shift, shift - lowest)
        scales, _offsets = _tables(values.device)
        code = _scale_code(half_range / self._reach, scales)
        unfit = ~torch.isfinite(half_range) | (code == NOT_FINITE)
        return (
            torch.where(unfit, NOT_FINITE, code).to(torch.uint8),
            torch.where(unfit, 0, offset),
        )

    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        step, shift = self._numbers(parameters)
        numbers = scratch.take("numbers", values.shape, torch.float32)
        torch.sub(values, shift, out=numbers).div_(step)
        below, above = _cell(shift)
        below, above = below.div_(step), above.div_(step)
        inner = scratch.take("inner", values.shape, torch.float32)
        torch.clamp(numbers, -self._floor(below), self._floor(above), out=inner)
        in_cell = scratch.take("in_cell", values.shape, torch.bool)
        is_below = scratch.take("is_below", values.shape, torch.bool)
        torch.gt(numbers, -below, out=in_cell).logical_and_(torch.lt(numbers, above, out=is_below))
        torch.where(in_cell, inner, numbers, out=numbers)
        return _or_zero(self.elements.encode(numbers, scratch), parameters[0])

    def line(self, parameters: Parameters) -> Line:
        step, shift = self._numbers(parameters)
        return Line(step.mul_(self.elements.unit), shift)

    def _numbers(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """S and m."""
        scales, _offsets = _tables(parameters[0].device)
        return _pick(scales, parameters[0].to(torch.int32)), _shift_of(parameters[1])

    def _floor(self, numbers: Tensor) -> Tensor:
        """The largest element number below ``numbers`` (positive) by at least 1/64 of it, which
        is room for the rounding of values to the engine's dtype."""
        limit = numbers * (1 - 2.0**-6)
        codes = self.elements.encode(limit.clone(), Scratch(limit.device))
        nearest = torch.empty_like(limit)
        self.elements.decode(codes, nearest, Scratch(codes.device))
        too_large = nearest.mul_(self.elements.unit) > limit
        codes.sub_(too_large.to(torch.uint8))
        self.elements.decode(codes, nearest, Scratch(codes.device))
        return nearest.mul_(self.elements.unit)


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
        for _ in range(_SEARCH_ROUNDS):
            step = _pick(scales, code).mul_(self._step_factor)
            top, bottom = highest / step, lowest / step
            # From the rounded range, so that the rounded values call for this offset, too.
            offset = _offset_code((top.round() + bottom.round() + 1) / 2)
            number = _pick(offsets, offset)
            above, below = top.sub_(number), (number - 1).sub_(bottom)
            distance = torch.maximum(above, below)
            too_far = distance > self._reach
            if not too_far.any():
                break
            more = (torch.log2(distance / self._reach) * 8).ceil_().clamp_(1, 255).to(torch.int32)
            code = torch.where(too_far, code + more, code).clamp_(max=NOT_FINITE)
        else:
            raise AssertionError(f"no scale found in {_SEARCH_ROUNDS} rounds")
        offset = torch.where(code == NOT_FINITE, 0, offset)
        return code.to(torch.uint8), offset.to(torch.uint8)

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
_SORT_8: Final = (
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((1, 2), (5, 6), (0, 4), (3, 7)),
    ((1, 5), (2, 6)),
    ((1, 4), (3, 6)),
    ((2, 4), (3, 5)),
    ((3, 4),),
)
"""Batcher's network: comparing these places, in this order, sorts eight."""


def _median_of_16(values: Tensor, scratch: Scratch) -> Tensor:
    """The 8th smallest of ``[n, 16, width]``, ``[n, 1, width]``; NaN where there is one.

    A network of minima and maxima: torch's median is some ten times slower.
    """
    n, _tokens, width = values.shape
    planes = scratch.take("planes", (9, n, 2, width), torch.float32)
    places = list(planes.unbind(0))
    planes[:8].copy_(values.view(n, 2, 8, width).permute(2, 0, 1, 3))
    spare = places.pop()
    for step in _SORT_8:
        for one, other in step:
            torch.minimum(places[one], places[other], out=spare)
            torch.maximum(places[one], places[other], out=places[other])
            places[one], spare = spare, places[one]
    # Of two sorted halves, the smaller of i-th and (7 - i)-th are the eight smallest of all.
    middle = torch.minimum(places[0][:, :1], places[7][:, 1:])
    for i in range(1, 8):
        smaller = torch.minimum(places[i][:, :1], places[7 - i][:, 1:])
        torch.maximum(middle, smaller, out=middle)
    return middle


def _or_zero(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes, 0 throughout rows that are not finite: their bytes must be the same every time."""
    finite = scale != NOT_FINITE
    return codes if finite.all() else codes.mul_(finite)


def _shift_of(offset: Tensor) -> Tensor:
    """float32 of offset bytes."""
    shift = torch.empty(offset.shape, dtype=torch.float32, device=offset.device)
    _SHIFT.decode(offset, shift, Scratch(offset.device))
    return shift.mul_(_SHIFT.unit * SHIFT_UNIT)


def _cell(shift: Tensor) -> tuple[Tensor, Tensor]:
    """How far below and above a number is still rounded to ``shift``: half the
    distance to its neighbours. (What lies beyond the last belongs to it and is not kept in.)"""
    magnitude = shift.abs()
    # Below the normal numbers all are equally far apart; else 1/8 of the power of two.
    power = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
    outward = (power / 16).clamp_(min=SHIFT_UNIT * 2.0**-10)
    inward = torch.where(magnitude == power, outward / 2, outward).clamp_(min=SHIFT_UNIT * 2.0**-10)
    inward = torch.where(magnitude <= SHIFT_UNIT * 2.0**-6, outward, inward)
    positive = shift > 0
    return torch.where(positive, inward, outward), torch.where(positive, outward, inward)


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
