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
from octavo.errors import TransferError
from octavo.memory import view_at
from octavo.paged.cache import PagedKV, PagedKVError
from octavo.sinks import RAW_VARIANT
from octavo.transfer import Rows, Transfer
from octavo.transport.ring import ALIGNMENT

_UNPACKED_BYTES_MAX: Final = 16 << 20
"""Unpacked at a time, into memory that is used again: new memory for all of a slice would cost
as much time as the unpacking."""


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
        page_end = transfer.first_page + transfer.page_count
        covered = len(self._blocks) * self.cache.pages_per_block
        if page_end > covered:
            raise PagedKVError(
                f"the transfer ends at page {page_end}, the block table covers {covered}"
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


class PagedSource:
    """Puts pages out of an engine's cache, packed as ``profile`` says (a name of
    ``octavo.codec.PROFILES``, a codec's, or a ``Profile``).

    ``block_table[i]`` is the engine's block that holds tokens ``i * block_tokens`` and on of the
    chain. The engine must not write to those tokens meanwhile.
    """

    def __init__(
        self,
        cache: PagedKV,
        block_table: Sequence[int] | NDArray[np.int64],
        profile: Profile | str = "exact",
    ) -> None:
        self._placement = _Placement(cache, block_table)
        self._cache = cache
        self._profile: Final = Profile.named(profile) if isinstance(profile, str) else profile
        self._transfer: Transfer | None = None

    def begin(self, transfer: Transfer) -> None:
        self._placement.check(transfer)
        self._transfer = transfer

    def unit_lengths(self) -> NDArray[np.uint32]:
        transfer = self._begun()
        by_row = np.array(
            [
                [self.unit_bytes(position, unit) for unit in transfer.units]
                for position in self._kinds(transfer)
            ],
            dtype=np.uint32,
        )
        if (by_row == by_row.flat[0]).all():
            return by_row.reshape(-1)[:1]
        counts = np.ones(len(by_row), dtype=np.int64)
        counts[-1] = transfer.page_count - len(by_row) + 1
        return by_row.repeat(counts, axis=0).reshape(-1)

    def page_variants(self) -> NDArray[np.uint16]:
        transfer = self._begun()
        kinds = [self.variant(position) for position in self._kinds(transfer)]
        if len(set(kinds)) == 1:
            return np.array(kinds[:1], dtype=np.uint16)
        by_page = np.full(transfer.page_count, kinds[-1], dtype=np.uint16)
        by_page[0] = kinds[0]
        return by_page

    def fill_rows(self, rows: Rows) -> None:
        for unit, of_unit in _by_unit(rows):
            is_first = rows.positions[of_unit] == 0
            for chosen in (of_unit[is_first], of_unit[~is_first]):
                if len(chosen):
                    self._fill(rows, unit, chosen)

    def _fill(self, rows: Rows, unit: int, chosen: NDArray[np.intp]) -> None:
        """Packs pages that share a codec."""
        codec = self._codec_at(int(rows.positions[chosen[0]]))
        packed = codec.pack(self.gather(unit, rows.positions[chosen]), self._cache.layout)
        if packed.shape[1] != int(rows.lengths[chosen][0]):
            raise TransferError(f"codec {codec.name} made {packed.shape[1]} bytes")
        memory = _UnitMemory(rows.addresses[chosen], packed.shape[1], writable=True)
        memory.write(packed)

    def gather(self, unit: int, positions: NDArray[np.int64]) -> Tensor:
        """The unit tensor (see ``Codec``) of some pages, in bits."""
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

    def unit_bytes(self, position: int, unit: int) -> int:
        return self._codec_at(position).unit_bytes(self._cache.layout, unit)

    def variant(self, position: int) -> int:
        return self._codec_at(position).variant

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        raise NotImplementedError("a paged source gives rows")

    def _codec_at(self, position: int) -> Codec:
        return self._profile.codec_at(self._cache.layout, position)

    def _kinds(self, transfer: Transfer) -> range:
        """Pages that stand for all: a chain's first page may be packed otherwise, the others
        are alike."""
        return range(transfer.first_page, transfer.first_page + min(transfer.page_count, 2))

    def _begun(self) -> Transfer:
        assert self._transfer is not None
        return self._transfer


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
        for unit, of_unit in _by_unit(rows):
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
        packed = _UnitMemory(rows.addresses[chosen], unit_bytes, writable=False).read().to(device)
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
        return max(1, _UNPACKED_BYTES_MAX // self._cache.layout.raw_unit_bytes(unit))

    def scatter(self, unit: int, positions: NDArray[np.int64], values: Tensor) -> None:
        """Writes a unit tensor (see ``Codec``), in bits, to the blocks of its pages."""
        blocks, pages = self._placement.of(positions)
        for layer, sides in enumerate(self._cache.page_views(unit)):
            if len(sides) == 1:
                sides[0][blocks, pages] = values[:, layer]
            else:
                for side, view in enumerate(sides):
                    view[blocks, pages] = values[:, layer, side]

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        raise NotImplementedError("a paged sink takes rows")


class _UnitMemory:
    """Units of equal length at given addresses. Evenly spaced ones are one strided tensor."""

    def __init__(self, addresses: NDArray[np.int64], unit_bytes: int, *, writable: bool) -> None:
        self._addresses = addresses
        self._unit_bytes = unit_bytes
        self._writable = writable
        self._step = self._even_step()

    def write(self, packed: Tensor) -> None:
        """Copies row i of ``packed`` (uint8) to address i."""
        if self._step is not None:
            self._strided(self._step).copy_(packed)
            return
        for address, row in zip(self._addresses.tolist(), packed, strict=True):
            _tensor_at(address, self._unit_bytes, writable=True).copy_(row)

    def read(self) -> Tensor:
        """uint8 [units, unit_bytes]; shares the memory where it is evenly spaced."""
        if self._step is not None:
            return self._strided(self._step)
        return torch.stack(
            [
                _tensor_at(address, self._unit_bytes, writable=False)
                for address in self._addresses.tolist()
            ]
        )

    def _even_step(self) -> int | None:
        if len(self._addresses) == 1:
            return self._unit_bytes
        steps = np.diff(self._addresses)
        step = int(steps[0])
        # A step that is no whole number of elements could not be viewed as such.
        is_even = step >= self._unit_bytes and step % ALIGNMENT == 0 and bool((steps == step).all())
        return step if is_even else None

    def _strided(self, step: int) -> Tensor:
        unit_count = len(self._addresses)
        span = step * (unit_count - 1) + self._unit_bytes
        whole = _tensor_at(int(self._addresses[0]), span, writable=self._writable)
        return whole.as_strided((unit_count, self._unit_bytes), (step, 1))


def _tensor_at(address: int, size_bytes: int, *, writable: bool) -> Tensor:
    # torch warns about read-only buffers. What is read from the arena is mapped read-only, so
    # a write through this tensor would be stopped by the kernel; this module makes none.
    return torch.frombuffer(view_at(address, size_bytes, writable=True), dtype=torch.uint8)


def _by_unit(rows: Rows) -> list[tuple[int, NDArray[np.intp]]]:
    """Row places of each unit, in order."""
    return [(unit, np.flatnonzero(rows.units == unit)) for unit in np.unique(rows.units).tolist()]
