"""Quantises rows such that packing what was unpacked gives the same bytes.

Let T be "unpack, then pack". Nearly every row is a fixed point of T at once (see ``rows`` and
``channels`` for why). The few whose statistics move when their values are rounded are sent
through T until they stand still, and where T goes round in a circle, every state of the circle
leads to the same bytes: the smallest of them. Either way, packing again ends where it started.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.codec.rows import Parameters, Rows

ROUNDS_MAX: Final = 24
"""Rounds of T before a row is taken to go round in a circle. Two are usual."""

CIRCLE_MAX: Final = 8
"""Length of a circle that is recognised. None longer than two was ever seen."""

_LARGEST: Final = {torch.float16: 65504.0, torch.float32: torch.finfo(torch.float32).max}


def finish(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values (changed by the call) as ``dtype``. What rounding has carried beyond its
    largest number becomes that number; NaN stays. bfloat16 reaches as far as float32."""
    largest = _LARGEST.get(dtype)
    return (values if largest is None else values.clamp_(-largest, largest)).to(dtype)


def settled(rows: Rows, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Parameters]:
    """Codes and parameters of float32 values that will be unpacked as ``dtype``."""
    parameters = rows.measure(values)
    codes = rows.quantise(values, parameters)
    state = (codes, *parameters)
    following = _again(rows, state, dtype)
    moving = _differ(rows, state, following)
    if moving.any():
        chosen = moving.nonzero(as_tuple=True)
        moved = _settle_moving(rows, _take(rows, following, chosen), dtype)
        for whole, part in zip(state, moved, strict=True):
            _rows_last(rows, whole)[chosen] = _rows_last(rows, part)[:, 0]
    return codes, parameters


_State = tuple[Tensor, ...]
"""Codes, then the parameters."""


def _again(rows: Rows, state: _State, dtype: torch.dtype) -> _State:
    """T."""
    codes, *parameters = state
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    rows.dequantise(codes, tuple(parameters), values)
    values = finish(values, dtype).float()
    found = rows.measure(values)
    return (rows.quantise(values, found), *found)


def _settle_moving(rows: Rows, state: _State, dtype: torch.dtype) -> _State:
    for _ in range(ROUNDS_MAX):
        following = _again(rows, state, dtype)
        if not _differ(rows, state, following).any():
            return state
        state = following
    smallest = state
    for _ in range(CIRCLE_MAX):
        state = _again(rows, state, dtype)
        smallest = _smaller(rows, state, smallest)
    return smallest


def _differ(rows: Rows, one: _State, other: _State) -> Tensor:
    """By row, whether the bytes differ; without the dimension along which rows run."""
    differ = (one[0] != other[0]).any(rows.dim)
    for mine, its in zip(one[1:], other[1:], strict=True):
        differ |= (_bits(mine) != _bits(its)).squeeze(rows.dim)
    return differ


def _smaller(rows: Rows, one: _State, other: _State) -> _State:
    """By row, the one of two states that comes first in the order of its bytes."""
    mine, its = _as_numbers(rows, one), _as_numbers(rows, other)
    place = (mine != its).to(torch.uint8).argmax(-1, keepdim=True)
    first = mine.gather(-1, place) < its.gather(-1, place)
    keep = first.transpose(1, 2) if rows.dim == 1 else first
    return tuple(torch.where(keep, a, b) for a, b in zip(one, other, strict=True))


def _as_numbers(rows: Rows, state: _State) -> Tensor:
    """int32 [n, rows, parameters and codes]."""
    parts = [_rows_last(rows, _bits(part)).to(torch.int32) for part in (*state[1:], state[0])]
    return torch.cat(parts, -1)


def _take(rows: Rows, state: _State, chosen: tuple[Tensor, ...]) -> _State:
    """The chosen rows alone, one to an entry of the leading dimension."""
    taken = (_rows_last(rows, part)[chosen].unsqueeze(1) for part in state)
    return tuple(part.transpose(1, 2) if rows.dim == 1 else part for part in taken)


def _rows_last(rows: Rows, part: Tensor) -> Tensor:
    """A view with the rows' elements in the last dimension."""
    return part.transpose(1, 2) if rows.dim == 1 else part


def _bits(part: Tensor) -> Tensor:
    if part.dtype == torch.float16:
        return part.view(torch.int16)
    return part.view(torch.int32) if part.dtype == torch.float32 else part
