"""Blocks on a GPU: pages are gathered in canonical order and packed by a codec.

The gather runs on the engine's stream, right behind the step that computed the pages, into
memory of its own; packing and the way to the host happen on the transfer thread's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.codec import Profile
from octavo.paged import PagedKV, PagedSink, PagedSource
from octavo.shards import Shard
from octavo.transfer import Rows, RowSink, RowSource
from octavo.vllm.errors import EngineRefused
from octavo_proto.layout import DTYPE_BYTES, KvKind, Layout

_FLOAT8: Final = {"float8_e4m3fn", "float8_e5m2"}
"""vLLM keeps FP8 KV in uint8 tensors."""


class Budget:
    """A bound on bytes in use. Thread-safe; ``take`` never waits."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes: Final = size_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            if self._used_bytes + size_bytes > self.size_bytes:
                return False
            self._used_bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= size_bytes


class GatheredSource(PagedSource):
    """Puts pages that were gathered before."""

    def __init__(
        self,
        cache: PagedKV,
        table: NDArray[np.int64],
        profile: Profile,
        units: Sequence[int],
        first_page: int,
        page_end: int,
    ) -> None:
        super().__init__(cache, table, profile)
        self._first_page = first_page
        positions = np.arange(first_page, page_end, dtype=np.int64)
        self._units = {unit: super(GatheredSource, self).gather(unit, positions) for unit in units}
        self.ready: Final = _event_here(cache.device)

    def gather(self, unit: int, positions: NDArray[np.int64]) -> Tensor:
        gathered = self._units[unit]
        first = int(positions[0]) - self._first_page
        if len(positions) == int(positions[-1]) - int(positions[0]) + 1:
            return gathered[first : first + len(positions)]
        return gathered[torch.as_tensor(positions - self._first_page, device=gathered.device)]

    def fill_rows(self, rows: Rows) -> None:
        if self.ready is not None:
            cast("Any", torch.cuda).current_stream().wait_event(self.ready)
        super().fill_rows(rows)


class CanonicalSnapshot:
    """Gathered pages on the device."""

    def __init__(self, source: RowSource, budget: Budget, size_bytes: int) -> None:
        self.source = source
        self._budget = budget
        self._size_bytes = size_bytes

    def release(self) -> None:
        self._budget.give_back(self._size_bytes)


class CanonicalBlocks:
    """Tensors of logical shape ``[block, head, token, K and V]`` (MLA: ``[block, 1, token,
    latent and rope]``) of any strides, one a layer.

    Raises:
        EngineRefused: they do not fit the layout.
    """

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        caches: Sequence[Tensor],
        block_count: int,
        profile: str,
        budget: Budget,
    ) -> None:
        self.layout = layout
        self.units = shard.units
        self._profile: Final = Profile.named(profile)
        self._budget = budget
        if any(cache.shape[0] != block_count for cache in caches):
            raise EngineRefused(
                f"the engine splits each block in {caches[0].shape[0] // block_count} kernel "
                "blocks; set block_size to what its attention backend uses"
            )
        self._cache: Final = PagedKV(
            layout,
            [_typed(cache, layout) for cache in caches],
            "block token latent" if layout.kind is KvKind.MLA else "block head token kv_dim",
            layer_begin=shard.held.layer_begin,
            head_begin=shard.held.head_begin,
        )
        self._streams = threading.local()

    @property
    def pages_per_block(self) -> int:
        return self._cache.pages_per_block

    @property
    def page_bytes(self) -> int:
        return sum(self.layout.raw_unit_bytes(unit) for unit in self.units)

    def snapshot(
        self, block_ids: Sequence[int], first_page: int, page_end: int
    ) -> CanonicalSnapshot | None:
        size_bytes = (page_end - first_page) * self.page_bytes
        if not self._budget.take(size_bytes):
            return None
        table = self._table(block_ids, first_page)
        source = GatheredSource(self._cache, table, self._profile, self.units, first_page, page_end)
        return CanonicalSnapshot(source, self._budget, size_bytes)

    def sink(self, block_ids: Sequence[int], first_page: int) -> RowSink:
        return PagedSink(self._cache, self._table(block_ids, first_page))

    def transfers(self) -> AbstractContextManager[None]:
        return self._on_own_stream() if self._cache.device.type == "cuda" else nullcontext()

    @contextmanager
    def _on_own_stream(self) -> Generator[None]:
        stream = getattr(self._streams, "own", None)
        if stream is None:
            stream = self._streams.own = cast("Any", torch.cuda).Stream(self._cache.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _table(self, block_ids: Sequence[int], first_page: int) -> NDArray[np.int64]:
        """A block table of the whole chain; what comes before ``first_page`` is not used."""
        first_block = first_page // self._cache.pages_per_block
        return np.concatenate(
            [np.zeros(first_block, dtype=np.int64), np.asarray(block_ids, dtype=np.int64)]
        )


def _typed(cache: Tensor, layout: Layout) -> Tensor:
    """The cache as the layout sees it: FP8 has its type, MLA no dimension of heads."""
    if layout.dtype in _FLOAT8 and cache.dtype == torch.uint8:
        cache = cache.view(getattr(torch, layout.dtype))
    width = layout.head_dim + layout.rope_dim
    if layout.kind is KvKind.MLA:
        if cache.dim() == 4 and cache.shape[1] == 1:
            cache = cache.squeeze(1)
        expected = width
    else:
        expected = 2 * layout.head_dim
    if cache.shape[-1] != expected or cache.element_size() != DTYPE_BYTES[layout.dtype]:
        raise EngineRefused(
            f"a KV cache of shape {tuple(cache.shape)} and {cache.dtype} is none of "
            f"{prod((expected,))} x {layout.dtype} a token and head"
        )
    return cache


def _event_here(device: torch.device) -> Any:
    """An event that marks this place on the engine's stream; None without streams."""
    if device.type != "cuda":
        return None
    event = cast("Any", torch.cuda).Event()
    event.record()
    return event
