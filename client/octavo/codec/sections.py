"""Where the parts of a packed unit lie in its bytes. Parts follow each other without gaps."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

_BYTES: Final = {"uint8": 1, "int16": 2, "float16": 2, "float32": 4}


class Sections:
    """Parts of a row of bytes, each a tensor of some shape and type, little-endian."""

    def __init__(self) -> None:
        self._parts: Final[dict[str, tuple[int, int, Shape, str]]] = {}
        self.size_bytes = 0

    def add(self, name: str, shape: Shape, dtype: str = "uint8") -> None:
        """Appends a part. Its bytes begin at a multiple of its element's size."""
        assert self.size_bytes % _BYTES[dtype] == 0, name
        begin, self.size_bytes = self.size_bytes, self.size_bytes + prod(shape) * _BYTES[dtype]
        self._parts[name] = (begin, self.size_bytes, shape, dtype)

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of their bytes."""
        return tuple(self._parts)

    def empty(self, data: Tensor, name: str) -> Tensor:
        """Memory for what ``write`` takes."""
        import torch

        _begin, _end, shape, dtype = self._parts[name]
        kind: torch.dtype = getattr(torch, dtype)
        return torch.empty((data.shape[0], *shape), dtype=kind, device=data.device)

    def read(self, data: Tensor, name: str) -> Tensor:
        """``[pages, *shape]`` out of uint8 ``[pages, size_bytes]``: a view where it is bytes, a
        copy where it is wider (pages may lie at any address)."""
        import torch

        begin, end, shape, dtype = self._parts[name]
        part = data[:, begin:end]
        if dtype != "uint8":
            part = part.contiguous().view(getattr(torch, dtype))
        return part.view(data.shape[0], *shape)

    def write(self, data: Tensor, name: str, values: Tensor) -> None:
        """Writes ``[pages, *shape]``, of the part's type, into uint8 ``[pages, size_bytes]``."""
        import torch

        begin, end, _shape, _dtype = self._parts[name]
        flat = values.contiguous().view(torch.uint8)
        data[:, begin:end].copy_(flat.view(data.shape[0], end - begin))
