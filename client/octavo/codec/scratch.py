"""Memory for what lives between two passes over a piece."""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import Tensor


class Scratch:
    """Tensors whose memory is used again. The system gives and takes new memory page by page,
    which takes several times as long as a pass over it."""

    def __init__(self, device: torch.device) -> None:
        self._device: Final = device
        self._flat: Final[dict[str, Tensor]] = {}

    def take(self, name: str, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, valid until ``name`` is taken again; its contents are arbitrary."""
        count = prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < count or flat.dtype != dtype:
            flat = self._flat[name] = torch.empty(count, dtype=dtype, device=self._device)
        return flat[:count].view(shape)
