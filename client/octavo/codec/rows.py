"""Rows: the runs of elements that share their scale.

All tensors here are float32 or codes ``[n, a, b]``; the rows of a scheme run along its ``dim``,
1 for the channels of K (``[groups, 16 tokens, heads * head_dim]``), 2 for a token's V of one
head and for the tiles of MLA. Parameters have the same shape with length 1 along ``dim``.

A row with a NaN or an infinity in it, or one that lies beyond its scale's reach, comes back as
NaN from end to end: what is not a number may not turn into one, and it stays in its row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from octavo.codec.elements import FP8_LARGEST, Elements, Unsigned
from octavo.codec.scratch import Scratch

Parameters = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """value = scale * number + shift, in float32; no shift is 0.

    Numbers have at most 8 significant bits and scales that go with a shift 11, so the product is
    exact and the value is rounded once, whether an implementation fuses the two or not.
    """

    scale: Tensor
    shift: Tensor | None

    def part(self, *index: slice) -> Line:
        """A part of both."""
        return Line(self.scale[index], None if self.shift is None else self.shift[index])

    def reshape(self, *shape: int) -> Line:
        """Both in another shape."""
        shift = None if self.shift is None else self.shift.reshape(shape)
        return Line(self.scale.reshape(shape), shift)


class Rows(ABC):
    """How rows are quantised. Stateless."""

    dim: int
    elements: Elements
    parameter_dtypes: tuple[str, ...]
    """Of the parameters as they are stored, in order."""

    @abstractmethod
    def measure(self, values: Tensor, scratch: Scratch) -> Parameters:
        """The parameters of float32 rows."""

    @abstractmethod
    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        """uint8 codes of float32 rows, in memory of ``scratch``."""

    @abstractmethod
    def line(self, parameters: Parameters) -> Line:
        """What takes numbers of codes to values."""

    def dequantise(self, codes: Tensor, line: Line, out: Tensor, scratch: Scratch) -> None:
        """Writes the float32 values of codes into ``out``, which is contiguous ``[n, a, b]``."""
        self.elements.decode(codes, out, scratch)
        if line.shift is None:
            out.mul_(line.scale)
        elif self.dim == 1:
            torch.addcmul(line.shift, out, line.scale, out=out)
        else:  # with two operands that stand still along a row, torch's addcmul is slow
            out.mul_(line.scale).add_(line.shift)


class ScaledRows(Rows):
    """value = scale * v, v an FP8 number; scale = the largest magnitude / 448, rounded to fp16
    or float32."""

    dim = 2

    def __init__(self, elements: Elements, scale_dtype: torch.dtype) -> None:
        self.elements = elements
        self._scale_dtype = scale_dtype
        self.parameter_dtypes = (str(scale_dtype).removeprefix("torch."),)

    def measure(self, values: Tensor, scratch: Scratch) -> Parameters:
        largest = torch.maximum(
            values.amax(self.dim, keepdim=True), -values.amin(self.dim, keepdim=True)
        ).abs_()  # of the two zeros, one
        return (_or_nan((largest / FP8_LARGEST).to(self._scale_dtype)),)

    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        scale = parameters[0].float()
        numbers = scratch.take("numbers", values.shape, torch.float32)
        torch.div(values, _divisor(scale), out=numbers)
        return _or_zero(self.elements.encode(numbers, scratch), scale)

    def line(self, parameters: Parameters) -> Line:
        return Line(parameters[0].float() * self.elements.unit, None)


class AffineRows(Rows):
    """value = zero + scale * q, q from 0 to 2^bits - 1; zero is the smallest value rounded down
    to fp16, scale reaches from there to the largest, in fp16.

    Why the smallest and not the middle: it survives its own rounding, so that the parameters
    found again are these.
    """

    dim = 2
    parameter_dtypes = ("float16", "float16")

    def __init__(self, bits: int) -> None:
        self.elements = Unsigned(bits)
        self._largest: Final = 2**bits - 1

    def measure(self, values: Tensor, scratch: Scratch) -> Parameters:
        lowest = values.amin(self.dim, keepdim=True)
        highest = values.amax(self.dim, keepdim=True)
        zero = _half_below(lowest)
        scale = ((highest - zero.float()).abs_() / self._largest).to(torch.float16)
        unfit = ~(torch.isfinite(zero) & torch.isfinite(scale))
        return (
            scale.masked_fill(unfit, torch.nan),
            zero.masked_fill(unfit, 0.0),
        )

    def quantise(self, values: Tensor, parameters: Parameters, scratch: Scratch) -> Tensor:
        scale, zero = (parameter.float() for parameter in parameters)
        numbers = scratch.take("numbers", values.shape, torch.float32)
        torch.sub(values, zero, out=numbers).div_(_divisor(scale))
        return _or_zero(self.elements.encode(numbers, scratch), scale)

    def line(self, parameters: Parameters) -> Line:
        scale, zero = parameters
        return Line(scale.float(), zero.float())


def _or_nan(scale: Tensor) -> Tensor:
    """Scales, those that are not finite as the one NaN that is ever written."""
    return scale.masked_fill(~torch.isfinite(scale), torch.nan)


def _or_zero(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes, 0 throughout rows that are not finite: their bytes must be the same every time."""
    finite = scale.isfinite()
    return codes if finite.all() else codes.mul_(finite)


def _divisor(scale: Tensor) -> Tensor:
    """Scales, with 1 for those of 0: all values of such rows are below half a step of fp16."""
    return scale.masked_fill(scale == 0, 1.0)


def _half_below(values: Tensor) -> Tensor:
    """The largest fp16 that is not above; -inf below -65,504."""
    nearest = values.clamp(max=65504.0).to(torch.float16)
    bits = nearest.view(torch.int16)
    # The next fp16 down: one more in magnitude below zero, one less above; -2^-24 under zero.
    below = torch.where(nearest > 0, bits - 1, bits + 1)
    below = torch.where(nearest == 0, torch.full_like(bits, -0x7FFF), below)
    chosen = torch.where(nearest.float() > values, below, bits)
    return chosen.view(torch.float16) + 0.0  # one zero only
