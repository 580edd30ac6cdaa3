"""The engine's own bits, unchanged."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from octavo.codec.base import Codec, unit_shape
from octavo_proto.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

RAW_VARIANT = 1
"""Units as the engine has them."""


class RawCodec(Codec):
    """Canonical unit bytes: the unit tensor, C-contiguous, little-endian.

    Also for engines that run an FP8 cache already: those bits are never quantised again.
    """

    name = "raw"
    variant = RAW_VARIANT

    def unit_bytes(self, layout: Layout, unit: int) -> int:
        unit_shape(layout, unit)  # names a unit or kind that is wrong
        return layout.raw_unit_bytes(unit)

    def pack(self, units: Tensor, layout: Layout) -> Tensor:
        import torch

        unit_bytes = prod(units.shape[1:]) * units.element_size()
        return units.detach().contiguous().view(torch.uint8).reshape(units.shape[0], unit_bytes)

    def unpack(self, data: Tensor, layout: Layout, unit: int, out: Tensor | None = None) -> Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, layout.dtype)
        units = data.view(dtype).reshape(data.shape[0], *unit_shape(layout, unit))
        return units if out is None else out.copy_(units)
