"""K in integers: rows are channels over sixteen tokens, with a byte of scale and a byte of offset.

A row's values lie on a lattice, step apart. Which scale and offset are best is searched for: of
sixteen numbers, the rounding errors of one lattice are often half those of the next, and what a
row's two extremes lose costs a model more than their share, since attention falls on them.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from octavo.codec.elements import Unsigned
from octavo.codec.numbers import INTEGER_SCALES, NOT_FINITE, OFFSETS
from octavo.codec.rows import Line, Parameters, Rows
from octavo.codec.scratch import Scratch
from octavo.codec.tables import first_code, or_zero, pick, sum_of_16

SCALES_TRIED: Final = {8: 3, 6: 6, 5: 6}
"""By bits: scales, from the first that a row fits on, whose extremes are compared. Six are a
quarter of an octave; two more cost time and gain nothing."""

LATTICES_TRIED: Final = {8: 1, 6: 4, 5: 4}
"""Of those, by bits: so many that meet the extremes best are compared on all sixteen values.
With 8 bits there is little left to gain, and an offset is no fraction of a step."""

EXTREMES_WEIGHT: Final = 3.0
"""What the squared errors of the two extremes count on top of those of all sixteen values."""

_PLACE: Final = 7
"""Bits of a key that say which candidate it is."""


class _Lattices(NamedTuple):
    """Candidates for each of n rows: ``[candidates, n]`` each."""

    step: Tensor
    offset: Tensor
    """From the middle of the codes, in steps."""
    loss: Tensor
    """Of both extremes, squared; infinite where one of them has no code."""

    def at(self, places: Tensor) -> _Lattices:
        """Those at ``[fewer, n]`` places."""
        return _Lattices(*(part.gather(0, places) for part in self))


class IntegerChannels(Rows):
    """value = step * (q - 2^(bits - 1)) + 8 * S * offset, step = S * 2^(10 - bits): the codes span
    128 offsets, which for 5 and 6 bits are fractions of a step.

    Packing again finds the same lattice: rounded values lie on it, so their extremes lose nothing
    there, which puts it among those that are compared, and all values lose nothing there either.
    """

    dim = 1
    parameter_dtypes = ("uint8", "uint8")

    def __init__(self, bits: int) -> None:
        self.elements = Unsigned(bits)
        self._largest: Final = 2**bits - 1
        self._half: Final = 2.0 ** (bits - 1)
        self._step_factor: Final = 2.0 ** (10 - bits)  # so that all formats share their scales
        self._offset_unit: Final = 2.0 ** (bits - 7)  # in steps
        self._scales_tried: Final = SCALES_TRIED[bits]
        self._trials: Final = LATTICES_TRIED[bits]

    def measure(self, values: Tensor, scratch: Scratch) -> Parameters:
        shape = (values.shape[0], 1, values.shape[2])
        lowest, highest = values.amin(self.dim).view(-1), values.amax(self.dim).view(-1)
        scales = _tables(values.device).scales
        # The range has to be reached, with half a step to spare, and its middle.
        needed = torch.maximum(
            (highest - lowest) / ((self._largest + 0.5) * self._step_factor),
            (highest + lowest).div_(2).abs_() / (8.0 * OFFSETS[-1]),
        )
        first = first_code(needed, _guess(needed), scales)
        scale, offset = self._search(values, lowest, highest, first, scratch)
        # Rows far from zero, whose offsets are coarse, may need a larger scale than their range.
        while True:
            first = (first + self._scales_tried).clamp_(max=NOT_FINITE)
            (at,) = ((scale == NOT_FINITE) & (first < NOT_FINITE)).nonzero(as_tuple=True)
            if not len(at):
                break
            left = values
            if self._trials > 1:
                left = values.transpose(1, 2)[at // shape[2], at % shape[2]].t().contiguous()[None]
            scale[at], offset[at] = self._search(left, lowest[at], highest[at], first[at], scratch)
        return scale.to(torch.uint8).view(shape), offset.to(torch.uint8).view(shape)

    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        step, number = self._numbers(parameters)
        numbers = scratch.take("numbers", values.shape, torch.float32)
        torch.div(values, step, out=numbers).sub_(number)
        return or_zero(self.elements.encode(numbers, scratch), parameters[0])

    def line(self, parameters: Parameters) -> Line:
        step, number = self._numbers(parameters)
        return Line(step, number.mul_(step))

    def _numbers(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """The step, and the lowest code's value in steps."""
        tables = _tables(parameters[0].device)
        scale, offset = (parameter.to(torch.int32) for parameter in parameters)
        step = pick(tables.scales, scale).mul_(self._step_factor)
        number = pick(tables.offsets, offset).mul_(self._offset_unit).sub_(self._half)
        return step, number

    def _search(
        self, values: Tensor, lowest: Tensor, highest: Tensor, first: Tensor, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """int32 bytes of scale and offset ``[n]``: the best from ``first`` on, or 255 and 0."""
        device = first.device
        places = torch.arange(self._scales_tried, dtype=torch.int32, device=device)[:, None]
        lattices = self._lattices(lowest, highest, first + places, scratch)
        keys = _keys(lattices.loss, places)
        chosen = torch.empty((self._trials, len(first)), dtype=torch.int64, device=device)
        for trial in range(self._trials):
            chosen[trial] = keys.amin(0) & _PLACE
            if trial + 1 < self._trials:
                keys.scatter_(0, chosen[trial : trial + 1], torch.iinfo(torch.int32).max)
        lattices = lattices.at(chosen)
        if self._trials > 1:
            errors = self._squared_errors(values, lattices, scratch)
            errors += lattices.loss * EXTREMES_WEIGHT
            errors.masked_fill_(lattices.loss == torch.inf, torch.inf)
            best = (_keys(errors, places[: self._trials]).amin(0) & _PLACE).to(torch.int64)[None]
            lattices, chosen = lattices.at(best), chosen.gather(0, best)
        offset = self._offset_code(lowest, highest, lattices)
        found = torch.isfinite(lattices.loss[0])
        scale = chosen[0].to(torch.int32).add_(first)
        return torch.where(found, scale, NOT_FINITE), torch.where(found, offset, 0)

    def _lattices(
        self, lowest: Tensor, highest: Tensor, codes: Tensor, scratch: Scratch
    ) -> _Lattices:
        """With the offsets that put the row's extremes on numbers of the lattice, as nearly as can
        be, and its middle into that of the codes."""
        levels, middle, above, below, rounded = (
            scratch.take(name, codes.shape, torch.float32)
            for name in ("levels", "middle", "above", "below", "nearest")
        )
        tables = _tables(codes.device)
        step = pick(tables.scales, codes.clamp_(max=NOT_FINITE)).mul_(self._step_factor)
        torch.div(highest - lowest, step, out=levels)
        torch.div((highest + lowest).div_(2), step, out=middle)
        offset = self._nearest_offset(middle, torch.round(levels, out=rounded))
        middle.sub_(offset)
        torch.add(middle, levels, alpha=0.5, out=above)
        torch.sub(middle, levels, alpha=0.5, out=below)
        # The codes of both extremes, from the middle one on.
        torch.round(above, out=levels)
        torch.round(below, out=rounded)
        above.sub_(levels)
        below.sub_(rounded)
        loss = (above.square_() + below.square_()).mul_(step).mul_(step)
        fits = torch.maximum(levels, rounded.add_(1).neg_(), out=levels) < self._half
        return _Lattices(step, offset, loss.masked_fill_(~fits, torch.inf))

    def _nearest_offset(self, middle: Tensor, levels: Tensor) -> Tensor:
        """In steps, for rows whose extremes are an even or odd number of levels apart."""
        halves = levels.div_(2)
        wanted = halves.frac_().add_(middle).div_(self._offset_unit)
        reach = OFFSETS[-1]
        place = wanted.round_().clamp_(-reach, reach).nan_to_num_(0.0).add_(reach).to(torch.int32)
        return pick(_tables(middle.device).nearest, place).mul_(self._offset_unit)

    def _offset_code(self, lowest: Tensor, highest: Tensor, lattices: _Lattices) -> Tensor:
        """int32 bytes: of the offset that the rounded extremes call for, if it has the same
        lattice and codes for both, since packing again starts from those; else of the offset."""
        step, offset = lattices.step[0], lattices.offset[0]
        top = (highest / step).sub_(offset).round_().add_(offset)
        bottom = (lowest / step).sub_(offset).round_().add_(offset)
        centred = self._nearest_offset((top + bottom) / 2, top - bottom)
        further = centred - offset
        fits = torch.maximum(top - centred, centred - bottom - 1) < self._half
        chosen = torch.where(fits & (further == further.round()), centred, offset)
        place = chosen.div_(self._offset_unit).add_(OFFSETS[-1]).nan_to_num_(0.0).to(torch.int32)
        return pick(_tables(step.device).codes, place)

    def _squared_errors(self, values: Tensor, lattices: _Lattices, scratch: Scratch) -> Tensor:
        """Of all values. None is beyond the codes where the extremes are not.

        Products and sums are rounded one by one, and sums go by halves, so that neither torch's
        choice of instructions nor a piece's end decides between two lattices.
        """
        errors = torch.empty_like(lattices.step)
        numbers = scratch.take("numbers", values.shape, torch.float32)
        rounded = scratch.take("rounds", values.shape, torch.float32)
        per_row = (values.shape[0], 1, values.shape[2])
        for error, scale, shift in zip(
            errors, lattices.step.reciprocal(), lattices.offset, strict=True
        ):
            torch.mul(values, scale.view(per_row), out=numbers).sub_(shift.view(per_row))
            torch.round(numbers, out=rounded)
            error.view(per_row).copy_(sum_of_16(numbers.sub_(rounded).square_()))
        return errors.mul_(lattices.step).mul_(lattices.step)


class _Tables(NamedTuple):
    scales: Tensor
    """By code, NaN at the last."""
    offsets: Tensor
    """By byte, those from 128 on below zero."""
    nearest: Tensor
    """The offset nearest to an integer, by its distance from the lowest offset."""
    codes: Tensor
    """The bytes of those."""


@cache
def _tables(device: torch.device) -> _Tables:
    scales = torch.tensor([*INTEGER_SCALES, torch.nan], dtype=torch.float32, device=device)
    magnitudes = torch.tensor(OFFSETS, dtype=torch.float32, device=device)
    wanted = torch.arange(OFFSETS[-1] + 1, dtype=torch.float32, device=device)
    # Halfway between two offsets the smaller one is the nearest.
    codes = torch.bucketize(wanted, (magnitudes[1:] + magnitudes[:-1]) / 2)
    both = torch.cat((codes[1:].flip(0) + 128, codes)).to(torch.int32)
    offsets = torch.cat((magnitudes, -magnitudes))
    return _Tables(scales, offsets, pick(offsets, both), both)


def _keys(losses: Tensor, places: Tensor) -> Tensor:
    """int32 in the order of losses, with a place in the lowest bits, so that none are equal."""
    return losses.view(torch.int32).bitwise_and(~_PLACE).bitwise_or_(places)


def _guess(needed: Tensor) -> Tensor:
    """The code of a scale, by the logarithm: two, 24 and four to the octave."""
    octave = torch.log2(needed)
    fine = torch.where(octave < -4, octave * 24 + 304, octave * 4 + 224)
    return torch.where(octave < -12, octave * 2 + 40, fine).ceil_()
