"""Which units a rank puts and gets, from tensor and pipeline parallelism alone.

KV is split over tensor-parallel ranks by KV head and over pipeline stages by layer. Experts
hold none of it, so expert parallelism changes nothing here. A layout's units are fixed, so pages
that were put at one TP size are got at any other that cuts the heads at the borders of units.

Where several ranks hold the same KV (more ranks than KV heads; MLA, whose latents every rank
has), each page is put by one of them, in turn by its position in the chain. The whole way of
a rank's put:

    shard = ShardMap(layout, tp=8).shard(rank)
    turns = shard.put_positions(chain.page_count)
    client.put(chain, source, units=shard.units, positions=turns)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.errors import InvalidRequest
from octavo_proto.layout import KvKind, Layout, UnitRange
from octavo_proto.limits import UNITS_MAX

TP_MAX: Final = 1024
"""As many as a layout may have KV heads; larger sizes would only add replicas."""


class ShardError(InvalidRequest):
    """A layout's units cannot be split over ranks like that; the message says what would fit."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of every page."""

    tp_rank: int
    pp_rank: int
    held: UnitRange
    """Layers and KV heads in the rank's own cache, counted in the layout."""
    units: tuple[int, ...]
    """Units that the rank gets, ascending; those it puts are the same."""
    replica: int
    """Which of ``replicas`` ranks with the same KV this one is."""
    replicas: int

    def puts(self, position: int) -> bool:
        """Whether it is this rank's turn to put the page at ``position`` of a chain."""
        return position % self.replicas == self.replica

    def put_positions(self, page_count: int, first_page: int = 0) -> NDArray[np.int64]:
        """Those of ``page_count`` pages from ``first_page`` on that this rank puts: the
        ``positions`` of ``Client.put``."""
        first = first_page + (self.replica - first_page) % self.replicas
        return np.arange(first, first_page + page_count, self.replicas, dtype=np.int64)


class ShardMap:
    """The shards of all ranks. Immutable.

    ``tp`` is the number of ranks that share the heads of one attention layer. An engine that
    runs attention data-parallel has fewer of them than GPUs. ``stage_layers`` are the layers of
    each pipeline stage where the engine does not cut them as evenly as it can, larger stages
    first.

    Raises:
        ShardError: heads or layers would be cut inside a unit, or cannot be cut like that.
    """

    def __init__(
        self, layout: Layout, tp: int, pp: int = 1, *, stage_layers: Sequence[int] | None = None
    ) -> None:
        if layout.kind is KvKind.FOREIGN:
            raise ShardError("the units of a foreign layout belong to no layers and heads")
        self.layout: Final = layout
        self.tp: Final = tp
        self.pp: Final = pp
        self._heads: Final = _heads_by_slice(layout.kv_heads, tp)
        self._layers: Final = _layers_by_stage(layout, pp, stage_layers)
        self.replicas: Final = tp // len(self._heads)
        """Ranks of a stage that hold the same KV."""
        head_borders, layer_borders = _borders(layout)
        if not {begin for begin, _end in self._heads} <= head_borders:
            raise ShardError(
                f"tp {tp} would cut heads inside units: {layout.kv_heads} KV heads in "
                f"{layout.head_parts} parts allow tp {_listed(tp_sizes(layout))}"
            )
        if not {begin for begin, _end in self._layers} <= layer_borders:
            raise ShardError(
                f"stages that begin at layers {[begin for begin, _end in self._layers]} would "
                f"cut units: parts of layers begin at {sorted(layer_borders - {layout.layers})}"
            )

    def shard(self, tp_rank: int, pp_rank: int = 0) -> Shard:
        """What rank ``tp_rank`` of stage ``pp_rank`` holds. Raises ShardError: no such rank."""
        if not (0 <= tp_rank < self.tp and 0 <= pp_rank < self.pp):
            raise ShardError(
                f"rank {tp_rank} of stage {pp_rank}, there are tp {self.tp} and pp {self.pp}"
            )
        heads, replica = divmod(tp_rank, self.replicas)
        held = UnitRange(*self._layers[pp_rank], *self._heads[heads])
        units = tuple(
            unit
            for unit in range(self.layout.unit_count)
            if _is_within(self.layout.unit_range(unit), held)
        )
        return Shard(tp_rank, pp_rank, held, units, replica, self.replicas)

    def shards(self) -> list[Shard]:
        """All of them, stage by stage: the order of ranks in vLLM and SGLang."""
        return [
            self.shard(tp_rank, pp_rank) for pp_rank in range(self.pp) for tp_rank in range(self.tp)
        ]

    def put_bytes(
        self, page_count: int, unit_bytes: Callable[[int, int], int] | None = None
    ) -> NDArray[np.int64]:
        """Bytes that each rank, in the order of ``shards()``, puts of a chain of new pages.

        ``unit_bytes`` says how many a unit has, by position and unit; None means codec raw.
        """

        def raw_bytes(_position: int, unit: int) -> int:
            return self.layout.raw_unit_bytes(unit)

        size = unit_bytes or raw_bytes
        return np.array(
            [
                sum(
                    size(position, unit)
                    for position in shard.put_positions(page_count).tolist()
                    for unit in shard.units
                )
                for shard in self.shards()
            ],
            dtype=np.int64,
        )


def tp_sizes(layout: Layout, tp_max: int = UNITS_MAX) -> tuple[int, ...]:
    """The TP sizes up to ``tp_max`` at which the layout's pages can be put and got."""
    head_borders, _layer_borders = _borders(layout)
    return tuple(
        tp
        for tp in range(1, tp_max + 1)
        if _splits_evenly(layout.kv_heads, tp)
        and {begin for begin, _end in _heads_by_slice(layout.kv_heads, tp)} <= head_borders
    )


def with_parts(
    layout: Layout, *, tp: Iterable[int], pp: Iterable[int] = (1,), fine_layers: bool = False
) -> Layout:
    """``layout`` cut into the fewest units that serve all these TP and PP sizes.

    Fewer units mean less metadata and larger transfers. The cut is part of the layout's
    identity: choose it for every size that is to share pages, before the first page is put.
    ``fine_layers`` cuts by layer as finely as the limit allows, for engines whose stages are
    uneven in a way of their own.

    Raises:
        ShardError: a size doesn't divide the heads, or the cut takes more than 64 units.
    """
    head_borders = {begin for size in tp for begin, _end in _heads_by_slice(layout.kv_heads, size)}
    layer_borders = {begin for size in pp for begin, _end in _layers_by_stage(layout, size, None)}
    head_parts = next(
        parts
        for parts in range(1, layout.kv_heads + 1)
        if head_borders <= _cut_borders(layout.kv_heads, parts)
    )
    layer_parts_max = min(UNITS_MAX // head_parts, layout.layers) if head_parts <= UNITS_MAX else 0
    candidates = range(1, layer_parts_max + 1)
    for layer_parts in reversed(candidates) if fine_layers else candidates:
        if layer_borders <= _cut_borders(layout.layers, layer_parts):
            return replace(layout, head_parts=head_parts, layer_parts=layer_parts)
    raise ShardError(
        f"{layout.kv_heads} KV heads in {head_parts} parts and layers cut at "
        f"{sorted(layer_borders - {0})} take more than {UNITS_MAX} units"
    )


def _is_within(inner: UnitRange, outer: UnitRange) -> bool:
    return (
        outer.layer_begin <= inner.layer_begin
        and inner.layer_end <= outer.layer_end
        and outer.head_begin <= inner.head_begin
        and inner.head_end <= outer.head_end
    )


def _splits_evenly(kv_heads: int, tp: int) -> bool:
    return tp >= 1 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _heads_by_slice(kv_heads: int, tp: int) -> list[tuple[int, int]]:
    """Half-open ranges of heads, one for each group of ranks that hold the same ones."""
    if tp > TP_MAX or not _splits_evenly(kv_heads, tp):
        raise ShardError(
            f"tp is {tp}, allowed: a divisor or a multiple of the {kv_heads} KV heads, "
            f"1 to {TP_MAX}"
        )
    slices = min(tp, kv_heads)
    width = kv_heads // slices
    return [(index * width, (index + 1) * width) for index in range(slices)]


def _layers_by_stage(
    layout: Layout, pp: int, stage_layers: Sequence[int] | None
) -> list[tuple[int, int]]:
    if not 1 <= pp <= layout.layers:
        raise ShardError(f"pp is {pp}, allowed: 1 to the {layout.layers} layers")
    if stage_layers is None:
        return list(pairwise(sorted(_cut_borders(layout.layers, pp))))
    if len(stage_layers) != pp or min(stage_layers) < 1 or sum(stage_layers) != layout.layers:
        raise ShardError(
            f"stage_layers {list(stage_layers)} must be {pp} counts that add up to {layout.layers}"
        )
    return list(pairwise(accumulate(stage_layers, initial=0)))


def _borders(layout: Layout) -> tuple[set[int], set[int]]:
    """Where units of the layout begin and end: heads, layers."""
    ranges = [layout.unit_range(unit) for unit in range(layout.unit_count)]
    heads = {edge for part in ranges for edge in (part.head_begin, part.head_end)}
    layers = {edge for part in ranges for edge in (part.layer_begin, part.layer_end)}
    return heads, layers


def _cut_borders(total: int, parts: int) -> set[int]:
    """Borders of near-equal parts, the larger ones first, as a layout has them."""
    small, larger = divmod(total, parts)
    return {index * small + min(index, larger) for index in range(parts + 1)}


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
