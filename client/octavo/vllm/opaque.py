"""Blocks whose bytes only a like engine understands: copied as they are, head by head.

A block is one page. Within a layer, a block's heads lie one after the other, each contiguous, so
the unit of some heads is a contiguous piece of each layer's block.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from octavo.memory import copy_extents
from octavo.shards import Shard
from octavo.sinks import BufferSource
from octavo.transfer import Rows, RowSink, RowSource, Transfer
from octavo.transport.ring import RingState, Span
from octavo.vllm.errors import EngineRefused
from octavo_proto.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


TOUCH_BYTES: Final = 4096
"""A page of the kernel's."""


class StagingRoom:
    """Host memory for snapshots. Thread-safe; ``take`` never waits."""

    def __init__(self, size_bytes: int) -> None:
        # Written to now, before anything lies in it: the kernel gives memory on the first write,
        # which would then take three times as long, on the engine's thread.
        self._memory = np.empty(size_bytes, dtype=np.uint8)
        self._memory[::TOUCH_BYTES] = 0
        self._address: Final = int(self._memory.ctypes.data)
        self._state = RingState(size_bytes)
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._state.size_bytes

    @property
    def used_bytes(self) -> int:
        return self._state.used_bytes

    def take(self, size_bytes: int) -> tuple[Span, int] | None:
        """A span and its address, or None."""
        with self._lock:
            span = self._state.take(size_bytes)
        return None if span is None else (span, self._address + span.offset)

    def give_back(self, span: Span) -> None:
        with self._lock:
            self._state.give_back(span)


class OpaqueSnapshot:
    """Pages in staging room."""

    def __init__(self, source: RowSource, room: StagingRoom, span: Span) -> None:
        self.source = source
        self._room = room
        self._span = span

    def release(self) -> None:
        self._room.give_back(self._span)


class OpaqueBlocks:
    """Block tensors in CPU memory, one a layer, block first.

    Raises:
        EngineRefused: a block is not contiguous, or has another size than the layout says.
    """

    def __init__(
        self, layout: Layout, shard: Shard, caches: Sequence[Tensor], room: StagingRoom
    ) -> None:
        self.layout = layout
        self.units = shard.units
        self._room = room
        self._caches = list(caches)  # keeps the memory alive
        unit_bytes = {layout.raw_unit_bytes(unit) for unit in self.units}
        if len(unit_bytes) != 1:
            raise EngineRefused(f"units of different sizes: {sorted(unit_bytes)}")
        self._unit_bytes = unit_bytes.pop()
        held_heads = shard.held.head_end - shard.held.head_begin
        layer_bytes = self._unit_bytes * len(self.units) // len(caches)
        for cache in self._caches:
            _check_block(cache, layer_bytes)
        self._bases: NDArray[np.int64] = np.array(
            [cache.data_ptr() for cache in self._caches], dtype=np.int64
        )
        self._strides: NDArray[np.int64] = np.array(
            [cache.stride(0) * cache.element_size() for cache in self._caches], dtype=np.int64
        )
        self._piece_bytes = layer_bytes // len(self.units)
        head_bytes = layer_bytes // held_heads
        self._offsets: NDArray[np.int64] = np.array(
            [
                (layout.unit_range(unit).head_begin - shard.held.head_begin) * head_bytes
                for unit in self.units
            ],
            dtype=np.int64,
        )

    @property
    def pages_per_block(self) -> int:
        return 1

    @property
    def page_bytes(self) -> int:
        return self._unit_bytes * len(self.units)

    def snapshot(
        self, block_ids: Sequence[int], first_page: int, page_end: int
    ) -> OpaqueSnapshot | None:
        page_count = page_end - first_page
        taken = self._room.take(page_count * self.page_bytes)
        if taken is None:
            return None
        span, address = taken
        blocks = np.asarray(block_ids, dtype=np.int64)[:page_count]
        rows = np.arange(page_count * len(self.units), dtype=np.int64)
        addresses = address + rows * self._unit_bytes
        ranks = np.tile(np.arange(len(self.units)), page_count)
        self.copy(np.repeat(blocks, len(self.units)), ranks, addresses, into_blocks=False)
        size_bytes = page_count * self.page_bytes
        return OpaqueSnapshot(
            BufferSource((address, size_bytes), self._unit_bytes), self._room, span
        )

    def sink(self, block_ids: Sequence[int], first_page: int) -> RowSink:
        return OpaqueSink(self, np.asarray(block_ids, dtype=np.int64), first_page)

    def transfers(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(
        self,
        blocks: NDArray[np.int64],
        ranks: NDArray[np.int64],
        addresses: NDArray[np.int64],
        *,
        into_blocks: bool,
    ) -> None:
        """Copies units, one a row: ``ranks`` are their places among this worker's units,
        ``addresses`` where their bytes are to lie or lie."""
        places = (
            self._bases[None, :]
            + blocks[:, None] * self._strides[None, :]
            + self._offsets[ranks][:, None]
        ).ravel()
        layers = np.arange(len(self._bases), dtype=np.int64) * self._piece_bytes
        packed = (addresses[:, None] + layers[None, :]).ravel()
        lengths = np.full(len(places), self._piece_bytes, dtype=np.int64)
        if into_blocks:
            copy_extents(places, packed, lengths)
        else:
            copy_extents(packed, places, lengths)


class OpaqueSink:
    """Copies units of raw bytes straight from the node's memory into blocks."""

    def __init__(self, blocks: OpaqueBlocks, block_ids: NDArray[np.int64], first_page: int) -> None:
        self._blocks = blocks
        self._block_ids = block_ids
        self._first_page = first_page
        self._ranks: NDArray[np.int64] = np.zeros(256, dtype=np.int64)
        self._ranks[list(blocks.units)] = np.arange(len(blocks.units))
        self._unit_bytes = blocks.page_bytes // len(blocks.units)

    def begin(self, transfer: Transfer) -> None:
        if transfer.page_count > len(self._block_ids):
            raise EngineRefused(f"{transfer.page_count} pages for {len(self._block_ids)} blocks")

    def accept_rows(self, rows: Rows) -> None:
        if (rows.lengths != self._unit_bytes).any():
            raise EngineRefused(
                f"a unit of {int(rows.lengths.max())} bytes came, blocks hold {self._unit_bytes}"
            )
        blocks = self._block_ids[rows.positions - self._first_page]
        self._blocks.copy(blocks, self._ranks[rows.units], rows.addresses, into_blocks=True)


def _check_block(cache: Tensor, layer_bytes: int) -> None:
    block = cache[0]
    size_bytes = block.numel() * block.element_size()
    if not block.is_contiguous():
        raise EngineRefused(
            f"a block of shape {tuple(block.shape)} has strides {block.stride()}: not contiguous"
        )
    if size_bytes != layer_bytes:
        raise EngineRefused(
            f"a block of shape {tuple(block.shape)} has {size_bytes} bytes a layer, "
            f"the layout says {layer_bytes}"
        )
