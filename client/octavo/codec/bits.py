"""Codes of 5, 6 or 8 bits in bytes, over groups of sixteen tokens.

Of a group ``[16, width]``, eight rows of bytes hold the lower four bits of tokens r (low nibble)
and r + 8; then follow two rows with the fifth bit of tokens r + 2i in bit i, or four rows with
the upper two bits of tokens r + 4i in bits 2i and 2i + 1. So rows stay whole, and a row of the
engine's is read and written at full width.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.codec.scratch import Scratch

GROUP_TOKENS: Final = 16


def packed_rows(bits: int) -> int:
    """Rows of bytes that hold a group."""
    return GROUP_TOKENS * bits // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[groups, 16, width]`` to bytes ``[groups, 2 * bits, width]``."""
    if bits == 8:
        return codes
    extra_bits = bits - 4
    rows = 2 * extra_bits  # of the plane of upper bits
    out = codes.new_zeros((codes.shape[0], packed_rows(bits), codes.shape[2]))
    torch.bitwise_and(codes[:, :8], 15, out=out[:, :8])
    out[:, :8].bitwise_or_(codes[:, 8:].bitwise_left_shift(4))
    upper = codes.bitwise_right_shift(4)
    for part in range(GROUP_TOKENS // rows):
        place = upper[:, part * rows : (part + 1) * rows]
        out[:, 8:].bitwise_or_(place.bitwise_left_shift(part * extra_bits))
    return out


def unpack_bits(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The inverse of ``pack_bits``, in memory of ``scratch``; ``packed`` may be strided."""
    if bits == 8:
        return packed
    extra_bits = bits - 4
    rows = 2 * extra_bits
    groups, _rows, width = packed.shape
    codes = scratch.take("codes", (groups, GROUP_TOKENS, width), torch.uint8)
    torch.bitwise_and(packed[:, :8], 15, out=codes[:, :8])
    torch.bitwise_right_shift(packed[:, :8], 4, out=codes[:, 8:])
    parts = GROUP_TOKENS // rows
    shifts = torch.arange(0, 8, extra_bits, dtype=torch.uint8, device=packed.device)
    upper = scratch.take("upper", (groups, parts, rows, width), torch.uint8)
    torch.bitwise_right_shift(packed[:, None, 8:], shifts.view(-1, 1, 1), out=upper)
    upper.bitwise_and_((1 << extra_bits) - 1).mul_(16)
    codes.bitwise_or_(upper.view(codes.shape))
    return codes
