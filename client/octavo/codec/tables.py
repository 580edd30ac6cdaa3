"""Looking up numbers by code, and codes of numbers, on rows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.codec.numbers import NOT_FINITE


def pick(table: Tensor, index: Tensor) -> Tensor:
    """table[index]; index_select is four times faster than indexing."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def first_code(needed: Tensor, guess: Tensor, scales: Tensor) -> Tensor:
    """int32: the first of 255 scales that is not below; 255 beyond the last and for NaN.

    ``guess`` may be off by one code, as logarithms are in their last bits. (A binary search takes
    ten times as long.)
    """
    code = guess.clamp_(0, NOT_FINITE).nan_to_num_(0.0).to(torch.int32)
    code.add_((needed > pick(scales, code)).to(torch.int32)).clamp_(max=NOT_FINITE)
    below = (code - 1).clamp_(min=0)
    code = torch.where(needed <= pick(scales, below), below, code)
    return torch.where(torch.isfinite(needed), code, NOT_FINITE)


def or_zero(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes, 0 throughout rows that are not finite: their bytes must be the same every time."""
    finite = scale != NOT_FINITE
    return codes if finite.all() else codes.mul_(finite)


def sum_of_16(values: Tensor) -> Tensor:
    """Over the middle dimension of ``[n, 16, width]``, halves added to halves, so that it does
    not depend on how torch would sum."""
    for half in (8, 4, 2, 1):
        values = values[:, :half] + values[:, half:]
    return values
