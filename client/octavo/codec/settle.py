"""Quantises rows such that packing what was unpacked gives the same bytes.

Let P measure parameters, Q quantise, U unpack, and T = "U, then P and Q" map packed rows to
packed rows. Most rows are fixed points of T at once (see ``rows`` and ``channels``). For others:

1. A row whose values lie on a circle of T, which is what step 3 may leave, becomes the smallest
   of that circle, in the order of its bytes: whichever of them is read, the same is written.
2. Other parameters are tried on the values given: those that P finds in what would be read.
3. What is still moving is sent through T until it stands still or goes round in a circle.

So what is written is a fixed point, or the smallest of a circle; either way, packing it again
ends where it started.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.codec.rows import Parameters, Rows
from octavo.codec.scratch import Scratch

TRIALS: Final = 3
"""Parameters tried in step 2. A fourth settles hardly any more rows."""

ROUNDS_MAX: Final = 12
"""Rounds of T after which a row must stand still or be on a circle. Three are usual."""

CIRCLE_MAX: Final = 8
"""Longest circle that is recognised."""

_LARGEST: Final = {torch.float16: 65504.0, torch.float32: torch.finfo(torch.float32).max}

_State = tuple[Tensor, ...]
"""Codes, then the parameters."""


def clamped(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values, changed by the call, to be converted to ``dtype``. What rounding has
    carried beyond its largest number becomes that number; NaN stays. bfloat16 needs none of
    this: it reaches as far as float32."""
    largest = _LARGEST.get(dtype)
    return values if largest is None else values.clamp_(-largest, largest)


class Settler:
    """Quantises rows a piece at a time, then settles those that move, all of them together:
    settling takes many small steps, which cost the same for more rows."""

    def __init__(
        self, rows: Rows, dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
    ) -> None:
        """``dtype`` is what the values, ``[n, a, b]`` in all, will be unpacked as."""
        self._maps: Final = _Maps(rows, dtype)
        per_row = [*shape]
        per_row[rows.dim] = 1
        self._state: Final = (
            torch.empty(shape, dtype=torch.uint8, device=device),
            *(
                torch.empty(per_row, dtype=getattr(torch, kind), device=device)
                for kind in rows.parameter_dtypes
            ),
        )
        self._first, self._second = Scratch(device), Scratch(device)
        self._moving: Final[list[tuple[Tensor, ...]]] = []
        self._given: Final[list[Tensor]] = []

    def add(self, values: Tensor, begin: int) -> None:
        """Quantises float32 rows, the ``begin``-th and on in the first dimension."""
        state = self._maps.pack(values, self._first)
        moving = self._maps.differ(state, self._maps.again(state, self._second))
        for whole, part in zip(self._state, state, strict=True):
            whole[begin : begin + len(part)] = part
        chosen = moving.nonzero(as_tuple=True)
        if len(chosen[0]):
            self._given.append(self._maps.rows_last(values)[chosen])
            self._moving.append((chosen[0] + begin, chosen[1]))

    def finish(self) -> tuple[Tensor, Parameters]:
        """Codes and parameters of all rows."""
        if self._given:
            maps = self._maps
            chosen = tuple(torch.cat(places) for places in zip(*self._moving, strict=True))
            given = maps.side_by_side(torch.cat(self._given))
            taken = (maps.side_by_side(maps.rows_last(part)[chosen]) for part in self._state)
            for whole, part in zip(self._state, _settle(maps, given, tuple(taken)), strict=True):
                maps.rows_last(whole)[chosen] = maps.rows_last(part)[0]
        return self._state[0], self._state[1:]


def _settle(maps: _Maps, given: Tensor, state: _State) -> _State:
    """Of rows side by side. Each step is for those only that are left: soon a few of many."""
    settled, closed = _circle_through(maps, given, state)
    (left,) = (~closed).nonzero(as_tuple=True)
    given, *rest = maps.taken((given, *state), left)
    state = tuple(rest)
    for step in range(TRIALS + ROUNDS_MAX):
        if not len(left):
            return settled
        if step < TRIALS:
            parameters = maps.rows.measure(maps.unpack(state), Scratch(given.device))
            state = (maps.rows.quantise(given, parameters, Scratch(given.device)), *parameters)
        following = maps.again(state)
        moving = maps.differ(state, following)[0]
        maps.put(settled, left, state)
        (places,) = moving.nonzero(as_tuple=True)
        left = left[places]
        given, *rest = maps.taken((given, *(state if step < TRIALS else following)), places)
        state = tuple(rest)
    best = state
    for _ in range(CIRCLE_MAX):
        state = maps.again(state)
        best = maps.where(maps.before(state, best), state, best)
    maps.put(settled, left, best)
    return settled


def _circle_through(maps: _Maps, given: Tensor, state: _State) -> tuple[_State, Tensor]:
    """The smallest of the states met until the values given are met again, and where they were."""
    found = tuple(part.clone() for part in state)
    smallest = state
    closed = torch.zeros_like(maps.differ(state, state)[0])
    left = torch.arange(len(closed), device=given.device)
    for _ in range(CIRCLE_MAX):
        values = maps.unpack(state)
        returned = ~maps.rows_differ(values, given)[0]
        maps.put(found, left, smallest)
        closed[left] = returned
        following = maps.pack(values)
        # What stands still will not return.
        (places,) = (maps.differ(state, following)[0] & ~returned).nonzero(as_tuple=True)
        if not len(places):
            break
        smallest = maps.where(maps.before(following, smallest), following, smallest)
        left = left[places]
        given, *parts = maps.taken((given, *following, *smallest), places)
        state, smallest = tuple(parts[: len(state)]), tuple(parts[len(state) :])
    return found, closed


class _Maps:
    """P, Q and U on all rows at once. Masks are by row: ``[n, rows]``."""

    def __init__(self, rows: Rows, dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype

    def pack(self, values: Tensor, scratch: Scratch | None = None) -> _State:
        """P and Q. The codes are in memory of ``scratch``, if one is given."""
        scratch = scratch or Scratch(values.device)
        parameters = self.rows.measure(values, scratch)
        return (self.rows.quantise(values, parameters, scratch), *parameters)

    def unpack(self, state: _State, scratch: Scratch | None = None) -> Tensor:
        scratch = scratch or Scratch(state[0].device)
        values = scratch.take("values", state[0].shape, torch.float32)
        self.rows.dequantise(state[0], self.rows.line(state[1:]), values, scratch)
        rounded = scratch.take("rounded", values.shape, self.dtype)
        return values.copy_(rounded.copy_(clamped(values, self.dtype)))

    def again(self, state: _State, scratch: Scratch | None = None) -> _State:
        """T."""
        return self.pack(self.unpack(state, scratch), scratch)

    def differ(self, one: _State, other: _State) -> Tensor:
        """Where the bytes differ."""
        differ = self.rows_differ(one[0], other[0])
        for mine, its in zip(one[1:], other[1:], strict=True):
            differ |= self.rows_differ(_bits(mine), _bits(its))
        return differ

    def rows_differ(self, one: Tensor, other: Tensor) -> Tensor:
        if one.dtype == torch.uint8:  # comparing bytes takes ten times as long
            return (one ^ other).amax(self.rows.dim) != 0
        return (one != other).any(self.rows.dim)

    def before(self, one: _State, other: _State) -> Tensor:
        """Where the first comes first in the order of its parameters' and codes' bytes."""
        mine, its = self._numbers(one), self._numbers(other)
        place = (mine != its).to(torch.uint8).argmax(-1, keepdim=True)
        return (mine.gather(-1, place) < its.gather(-1, place)).squeeze(-1)

    def where(self, mask: Tensor, one: _State, other: _State) -> _State:
        keep = mask.unsqueeze(self.rows.dim)
        return tuple(torch.where(keep, a, b) for a, b in zip(one, other, strict=True))

    def taken(self, parts: _State, places: Tensor) -> _State:
        """Some of the rows that lie side by side."""
        return tuple(part.index_select(3 - self.rows.dim, places) for part in parts)

    def put(self, whole: _State, places: Tensor, parts: _State) -> None:
        """The reverse."""
        for target, part in zip(whole, parts, strict=True):
            target.index_copy_(3 - self.rows.dim, places, part)

    def side_by_side(self, chosen: Tensor) -> Tensor:
        """``[rows, length]`` as a single group."""
        return self.rows_last(chosen.unsqueeze(0)).contiguous()

    def rows_last(self, part: Tensor) -> Tensor:
        """The view with a row's elements in the last dimension, and back again."""
        return part.transpose(1, 2) if self.rows.dim == 1 else part

    def _numbers(self, state: _State) -> Tensor:
        parts = [self.rows_last(_bits(part)).to(torch.int32) for part in (*state[1:], state[0])]
        return torch.cat(parts, -1)


def _bits(part: Tensor) -> Tensor:
    if part.dtype == torch.float16:
        return part.view(torch.int16)
    return part.view(torch.int32) if part.dtype == torch.float32 else part
