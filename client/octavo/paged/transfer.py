"""Gathers pages from an engine's blocks into unit bytes, and scatters them back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.codec import Codec, Profile, codec_of
from octavo.codec.base import unit_shape
from octavo.codec.raw import RAW_VARIANT
from octavo.errors import TransferError
from octavo.paged.cache import PagedKV, PagedKVError
from octavo.paged.packing import UNPACKED_BYTES_MAX, PackingSource
from octavo.paged.units import UnitMemory, by_unit
from octavo.transfer import Rows, Transfer


class _Placement:
    """Which block of the engine, and which page within it, a page of the chain is."""

    def __init__(self, cache: PagedKV, block_table: Sequence[int] | NDArray[np.int64]) -> None:
        self.cache: Final = cache
        self._blocks = np.asarray(block_table, dtype=np.int64)
        if self._blocks.ndim != 1:
            raise PagedKVError("the block table must have one dimension")
        outside = self._blocks[(self._blocks < 0) | (self._blocks >= cache.block_count)]
        if len(outside):
            raise PagedKVError(
                f"block {int(outside[0])} in the block table, the cache has {cache.block_count}"
            )

    def check(self, transfer: Transfer) -> None:
        if transfer.layout != self.cache.layout:
            raise PagedKVError("the chain's layout is not the cache's")
        covered = len(self._blocks) * self.cache.pages_per_block
        if transfer.page_end > covered:
            raise PagedKVError(
                f"the transfer ends at page {transfer.page_end}, the block table covers {covered}"
            )
        for unit in transfer.units:
            self.cache.page_views(unit)

    def of(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Block ids and page in block, as index tensors on the cache's device."""
        places, pages = np.divmod(positions, self.cache.pages_per_block)
        device = self.cache.device
        return (
            torch.as_tensor(self._blocks[places], device=device),
            torch.as_tensor(np.ascontiguousarray(pages), device=device),
        )


class PagedSource(PackingSource):
    """Puts pages out of an engine's cache, packed as ``profile`` says (a name of
    ``octavo.codec.PROFILES``, a codec's, or a ``Profile``); None leaves it to the client.

    ``block_table[i]`` is the engine's block that holds tokens ``i * block_tokens`` and on of the
    chain. The engine must not write to those tokens meanwhile.
    """

    def __init__(
        self,
        cache: PagedKV,
        block_table: Sequence[int] | NDArray[np.int64],
        profile: Profile | str | None = None,
    ) -> None:
        super().__init__(cache.layout, profile)
        self._placement = _Placement(cache, block_table)
        self._cache = cache

    def begin(self, transfer: Transfer) -> None:
        self._placement.check(transfer)
        super().begin(transfer)

    def gather(self, unit: int, positions: NDArray[np.int64]) -> Tensor:
        blocks, pages = self._placement.of(positions)
        layout = self._cache.layout
        shape = (len(positions), *unit_shape(layout, unit))
        gathered = torch.empty(shape, dtype=self._cache.bits_dtype, device=self._cache.device)
        for layer, sides in enumerate(self._cache.page_views(unit)):
            if len(sides) == 1:
                gathered[:, layer] = sides[0][blocks, pages]
            else:
                for side, view in enumerate(sides):
                    gathered[:, layer, side] = view[blocks, pages]
        return gathered


class PagedSink:
    """Gets pages into an engine's cache. Each unit is unpacked by the codec of its variant.

    Blocks of pages that the result does not call ``DONE`` hold arbitrary KV.
    """

    def __init__(self, cache: PagedKV, block_table: Sequence[int] | NDArray[np.int64]) -> None:
        self._placement = _Placement(cache, block_table)
        self._cache = cache
        self._room: Tensor | None = None

    def begin(self, transfer: Transfer) -> None:
        self._placement.check(transfer)

    def accept_rows(self, rows: Rows) -> None:
        layout = self._cache.layout
        for unit, of_unit in by_unit(rows):
            for variant in np.unique(rows.variants[of_unit]).tolist():
                chosen = of_unit[rows.variants[of_unit] == variant]
                codec = codec_of(variant)
                expected = codec.unit_bytes(layout, unit)
                if (rows.lengths[chosen] != expected).any():
                    raise TransferError(
                        f"unit {unit} came with {int(rows.lengths[chosen].max())} bytes, codec "
                        f"{codec.name} makes {expected}"
                    )
                for begin in range(0, len(chosen), self._batch(unit)):
                    self._unpack(rows, unit, chosen[begin : begin + self._batch(unit)], codec)

    def _unpack(self, rows: Rows, unit: int, chosen: NDArray[np.intp], codec: Codec) -> None:
        """Unpacks pages of one variant, at most a batch of them."""
        layout, device = self._cache.layout, self._cache.device
        unit_bytes = codec.unit_bytes(layout, unit)
        packed = UnitMemory(rows.addresses[chosen], unit_bytes, writable=False).read().to(device)
        if codec.variant == RAW_VARIANT:
            values = codec.unpack(packed, layout, unit)
        else:
            shape = (len(chosen), *unit_shape(layout, unit))
            if self._room is None or self._room.numel() < prod(shape):
                self._room = torch.empty(prod(shape), dtype=self._cache.bits_dtype, device=device)
            room = self._room[: prod(shape)].view(shape).view(getattr(torch, layout.dtype))
            values = codec.unpack(packed, layout, unit, room)
        self.scatter(unit, rows.positions[chosen], values.view(self._cache.bits_dtype))

    def _batch(self, unit: int) -> int:
        """Pages unpacked at a time."""
        return max(1, UNPACKED_BYTES_MAX // self._cache.layout.raw_unit_bytes(unit))

    def scatter(self, unit: int, positions: NDArray[np.int64], values: Tensor) -> None:
        """Writes a unit tensor (see ``Codec``), in bits, to the blocks of its pages."""
        blocks, pages = self._placement.of(positions)
        for layer, sides in enumerate(self._cache.page_views(unit)):
            if len(sides) == 1:
                sides[0][blocks, pages] = values[:, layer]
            else:
                for side, view in enumerate(sides):
                    view[blocks, pages] = values[:, layer, side]
