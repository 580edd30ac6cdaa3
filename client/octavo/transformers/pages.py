"""Pages of a transformers cache: gathering units out of it, scattering units into a new one.

A canonical unit is C-contiguous ``[layer][K, V][token][head][head_dim]``; a cache layer holds
keys and values each as ``[1, head, token, head_dim]``. Both classes keep one tensor
``[layer, 2, head, token, head_dim]`` in between, so that a page's unit is a single strided
copy, and treat elements as integers of their size: only a codec converts values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.codec import Profile, codec_of
from octavo.errors import InvalidRequest
from octavo.paged.packing import PackingSource
from octavo.transfer import Transfer
from octavo_proto.layout import DTYPE_BYTES, Layout

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type that carries an element of so many bytes."""


class KvCache(Protocol):
    """What is needed of a transformers cache."""

    @property
    def layers(self) -> Sequence[Any]:
        """Layers in order; each has ``keys`` and ``values`` of shape [1, heads, tokens, dim]."""
        ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> object:
        """Appends keys and values of new tokens to a layer."""
        ...


class _Staging:
    """KV of a run of pages, ``[layer, 2, head, token, head_dim]``, seen as units."""

    def __init__(self, layout: Layout, bits: torch.Tensor, first_page: int) -> None:
        self.layout: Final = layout
        self.bits: Final = bits
        self.first_page: Final = first_page
        self._array: NDArray[Any] = bits.numpy()

    def unit(self, position: int, unit: int) -> NDArray[Any]:
        """A writable view of one unit in canonical order."""
        part = self.layout.unit_range(unit)
        begin = (position - self.first_page) * self.layout.page_tokens
        end = begin + self.layout.page_tokens
        if not 0 <= begin < end <= self._array.shape[3]:
            raise IndexError(f"page {position} is not among those held")
        return self._array[
            part.layer_begin : part.layer_end, :, part.head_begin : part.head_end, begin:end
        ].transpose(0, 1, 3, 2, 4)

    def units(self, positions: NDArray[np.int64], unit: int) -> torch.Tensor:
        """A copy of one unit of some pages: ``[page, layer, 2, token, head, head_dim]``."""
        part, (layers, sides, heads, _tokens, dim) = self.layout.unit_range(unit), self.bits.shape
        paged = self.bits.view(layers, sides, heads, -1, self.layout.page_tokens, dim)
        held = paged[part.layer_begin : part.layer_end, :, part.head_begin : part.head_end]
        pages = torch.as_tensor(positions - self.first_page)
        return held.permute(3, 0, 1, 4, 2, 5)[pages]

    def check(self, positions: NDArray[np.int64]) -> None:
        """Raises InvalidRequest: a page that is not held."""
        end = self.first_page + self.bits.shape[3] // self.layout.page_tokens
        outside = positions[(positions < self.first_page) | (positions >= end)]
        if len(outside):
            raise InvalidRequest(
                f"page {outside[0]} is wanted, the source has pages {self.first_page} to {end - 1}"
            )


class CacheSource(PackingSource):
    """Offers pages of a cache's keys and values to ``Client.put``.

    It takes a copy when made: what the model appends to the cache later is not seen. Pages are
    packed as ``profile`` says (a name of ``octavo.codec.PROFILES``, a codec's, or a ``Profile``);
    None leaves it to the client.

    Raises:
        ValueError: the cache does not have those pages, or not the layout's shape.
        UnknownCodec: there is no such profile.
    """

    def __init__(
        self,
        cache: KvCache,
        layout: Layout,
        *,
        page_count: int,
        first_page: int = 0,
        profile: Profile | str | None = None,
    ) -> None:
        super().__init__(layout, profile)
        begin = first_page * layout.page_tokens
        end = begin + page_count * layout.page_tokens
        _check_cache(cache, layout, end)
        pairs = [
            torch.stack((layer.keys[0, :, begin:end], layer.values[0, :, begin:end]))
            for layer in cache.layers
        ]
        stacked = torch.stack(pairs).detach().to("cpu").contiguous()
        self._staging: Final = _Staging(layout, _as_bits(stacked), first_page)

    def begin(self, transfer: Transfer) -> None:
        super().begin(transfer)
        self._staging.check(transfer.positions)

    def gather(self, unit: int, positions: NDArray[np.int64]) -> torch.Tensor:
        return self._staging.units(positions, unit)


class CacheSink:
    """Takes pages from ``Client.get`` and makes a cache of them.

    Units may arrive in any order and from several threads: they write disjoint bytes.
    """

    def __init__(self, layout: Layout, *, page_count: int, first_page: int = 0) -> None:
        tokens = page_count * layout.page_tokens
        shape = (layout.layers, 2, layout.kv_heads, tokens, layout.head_dim)
        bits = torch.empty(shape, dtype=_BITS[DTYPE_BYTES[layout.dtype]])
        self._staging: Final = _Staging(layout, bits, first_page)

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        """Takes a unit's bytes out of ``view``, unpacked by the codec of its variant.

        Raises:
            UnknownVariant: a newer client packed it.
            ValueError: the unit has another size than the codec's.
        """
        layout, target = self._staging.layout, self._staging.unit(position, unit)
        codec = codec_of(variant)
        expected = codec.unit_bytes(layout, unit)
        if len(view) != expected:
            raise ValueError(
                f"unit {unit} has {len(view)} bytes in codec {codec.name}, must have {expected}"
            )
        # A copy: torch warns of memory that is mapped read-only.
        packed = torch.as_tensor(np.frombuffer(view, dtype=np.uint8).copy())
        values = _as_bits(codec.unpack(packed[None], layout, unit))
        np.copyto(target, values[0].numpy())

    def extend(self, cache: KvCache, page_count: int, *, device: str = "cpu") -> None:
        """Appends the first ``page_count`` pages that were taken to ``cache``.

        Pages that never arrived hold arbitrary bytes: ``page_count`` is what the get delivered.
        """
        layout = self._staging.layout
        tokens = page_count * layout.page_tokens
        dtype = getattr(torch, layout.dtype)
        values = self._staging.bits.view(dtype)[:, :, :, :tokens].to(device)
        for index in range(layout.layers):
            cache.update(values[index, 0][None], values[index, 1][None], index)


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.element_size()])


def _check_cache(cache: KvCache, layout: Layout, tokens: int) -> None:
    if len(cache.layers) != layout.layers:
        raise ValueError(f"the cache has {len(cache.layers)} layers, must have {layout.layers}")
    for index, layer in enumerate(cache.layers):
        keys: torch.Tensor | None = layer.keys
        held = 0 if keys is None or keys.numel() == 0 else int(keys.shape[2])
        if keys is None or held < tokens:
            raise ValueError(f"layer {index} holds {held} tokens, {tokens} are wanted")
        shape = (int(keys.shape[0]), int(keys.shape[1]), int(keys.shape[3]))
        if shape != (1, layout.kv_heads, layout.head_dim):
            raise ValueError(
                f"layer {index} has batch, heads, head_dim {shape}, "
                f"must have {(1, layout.kv_heads, layout.head_dim)}"
            )
        if str(keys.dtype) != f"torch.{layout.dtype}":
            raise ValueError(f"layer {index} is {keys.dtype}, the layout says {layout.dtype}")
