"""The engine's KV blocks as the worker's half sees them: copied out, and filled by loads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from octavo.transfer import RowSink, RowSource
from octavo.vllm.errors import EngineRefused
from octavo_proto.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


class Snapshot(Protocol):
    """A copy of some pages, made when they were complete: the engine may reuse its blocks."""

    source: RowSource
    """For a put of just these pages."""

    def release(self) -> None:
        """Gives its room back."""
        ...


class Blocks(Protocol):
    """One worker's KV cache. ``block_ids`` always begins with the block of ``first_page``."""

    layout: Layout
    units: tuple[int, ...]
    """Those that this worker holds, ascending."""

    @property
    def pages_per_block(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Room that a page takes in a snapshot."""
        ...

    def snapshot(self, block_ids: Sequence[int], first_page: int, page_end: int) -> Snapshot | None:
        """A copy, in order with the engine's own work on the device; None: no room now."""
        ...

    def sink(self, block_ids: Sequence[int], first_page: int) -> RowSink:
        """Takes pages from ``first_page`` on into these blocks."""
        ...

    def transfers(self) -> AbstractContextManager[None]:
        """Everything that a transfer thread does on the device happens within it, and is done
        when it is left."""
        ...


def ordered_caches(caches: dict[str, Tensor], layer_names: Sequence[str]) -> list[Tensor]:
    """The layers' tensors in the layout's order.

    Raises:
        EngineRefused: the engine did not register one of them.
    """
    missing = [name for name in layer_names if name not in caches]
    if missing:
        raise EngineRefused(f"the engine registered no KV cache for {', '.join(missing)}")
    return [caches[name] for name in layer_names]
