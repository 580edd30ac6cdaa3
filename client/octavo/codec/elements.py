"""Numbers of few bits: how one element of a row is rounded, and read back without casts.

torch's own FP8 casts run at a few hundred million elements a second on a CPU; the integer
operations here are vectorised and run at ten times that. Both FP8 formats are read through
fp16, of which e5m2 is the upper half and e4m3 the same bits one place further right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch
from torch import Tensor

from octavo.codec.scratch import Scratch

FP8_LARGEST: Final = 448.0
"""Both FP8 formats are used up to this number: e5m2's own 57,344 is taken as 448 x 2^7."""


class Elements(ABC):
    """An element format. Codes are uint8, one an element, before bits are packed."""

    bits: int
    unit: float
    """What ``decode`` has to be multiplied with; a power of two, folded into the scale."""

    @abstractmethod
    def encode(self, numbers: Tensor, scratch: Scratch) -> Tensor:
        """Codes of float32 numbers (changed by the call): nearest, ties to even, saturating.

        They are in memory of ``scratch``.
        """

    @abstractmethod
    def decode(self, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Writes the float32 numbers of codes, divided by ``unit``, into ``out``, exactly.

        ``out`` is contiguous and may have another shape.
        """


class E4M3(Elements):
    """Sign, four bits of exponent, three of mantissa; 2^-9 to 448. Its NaNs are never written."""

    bits = 8
    unit = 2.0**8  # the exponents of fp16 are biased by 15, those of e4m3 by 7

    def encode(self, numbers: Tensor, scratch: Scratch) -> Tensor:
        numbers.clamp_(-FP8_LARGEST, FP8_LARGEST).mul_(1 / self.unit)
        return _upper_bits(numbers, scratch, dropped=7)

    def decode(self, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        bits = _widened(codes, scratch)  # the sign fills bits 7 to 15
        bits.mul_(1 << 7).bitwise_and_(~0x4000)  # a shift takes longer
        out.view(codes.shape).copy_(bits.view(torch.float16))


class E5M2(Elements):
    """Sign, five bits of exponent, two of mantissa, times 2^-7. Infinities are never written."""

    bits = 8
    unit = 2.0**-7

    def encode(self, numbers: Tensor, scratch: Scratch) -> Tensor:
        numbers.clamp_(-FP8_LARGEST, FP8_LARGEST).mul_(1 / self.unit)
        return _upper_bits(numbers, scratch, dropped=8)

    def decode(self, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        bits = _widened(codes, scratch).mul_(1 << 8)
        out.view(codes.shape).copy_(bits.view(torch.float16))


class Unsigned(Elements):
    """Integers 0 to 2^bits - 1."""

    unit = 1.0

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.largest: Final = 2**bits - 1

    def encode(self, numbers: Tensor, scratch: Scratch) -> Tensor:
        # By way of int16: torch converts float32 to uint8 at a quarter of that speed.
        wide = scratch.take("wide", numbers.shape, torch.int16)
        wide.copy_(numbers.round_().clamp_(0, self.largest))
        return scratch.take("encoded", numbers.shape, torch.uint8).copy_(wide)

    def decode(self, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        out.view(codes.shape).copy_(codes)


def _widened(codes: Tensor, scratch: Scratch) -> Tensor:
    """int16 of bytes, bit 7 being the sign."""
    return scratch.take("widened", codes.shape, torch.int16).copy_(codes.view(torch.int8))


def _upper_bits(numbers: Tensor, scratch: Scratch, *, dropped: int) -> Tensor:
    """Numbers to fp16 and then, without the lowest bits of the mantissa, to a byte."""
    shape = numbers.shape
    half = scratch.take("half", shape, torch.float16).copy_(numbers).view(torch.int16)
    magnitude = scratch.take("wide", shape, torch.int16)
    other = scratch.take("other", shape, torch.int16)
    torch.bitwise_and(half, 0x7FFF, out=magnitude)
    torch.bitwise_right_shift(magnitude, dropped, out=other)  # its last bit: is it odd?
    magnitude.add_(other.bitwise_and_(1)).add_((1 << (dropped - 1)) - 1)
    magnitude.bitwise_right_shift_(dropped)
    # The sign, in bit 7; 0 for zero, so that packing again gives the same byte.
    torch.ne(magnitude, 0, out=other)
    half.bitwise_right_shift_(8).bitwise_and_(0x80).mul_(other)
    return scratch.take("encoded", shape, torch.uint8).copy_(magnitude.bitwise_or_(half))
