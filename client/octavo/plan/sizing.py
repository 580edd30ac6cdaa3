"""From a model, a load and hardware to bytes, sessions and seconds. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from octavo.plan.codec_bytes import CODECS, FIRST_PAGE, RAW, has_codec, unit_bytes
from octavo.plan.hardware import GPUS, LINKS, Gpu, Link
from octavo.plan.model import ModelShape
from octavo.shards import ShardError, ShardMap, with_parts
from octavo_proto.layout import Layout, LayoutError

SLOT_ALIGN_BYTES: Final = 4096
"""A node keeps each unit in a slot of whole 4 KiB, in memory and on NVMe."""

HBM_SHARE: Final = 0.9
"""Of HBM for weights and KV; the rest is for activations, graphs and communication."""

PREFILL_EFFICIENCY: Final = 0.5
"""Of the GPU's peak that a prefill reaches: what well-tuned engines get, and an assumption."""

TP_MAX: Final = 64
"""Largest TP size tried when none was asked for."""


class PlanError(ValueError):
    """Such a plan cannot be made; the message says what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for."""

    model: ModelShape
    context_tokens: int
    session_count: int
    """Sessions of that many tokens whose KV is wanted in memory."""
    nvme_session_count: int | None = None
    """Sessions that may come back from NVMe; None: as many as in memory."""
    node_count: int = 1
    page_tokens: int = 16
    tp: int | None = None
    """None: the smallest size at which weights and one raw session fit."""
    pp: int = 1
    dp: int = 1
    """Attention groups of TP x PP GPUs that share one set of routed experts."""
    gpu: Gpu = GPUS["h200"]
    hbm_share: float = HBM_SHARE
    weight_bits: int | None = None
    kv_dtype: str | None = None
    prefill_efficiency: float = PREFILL_EFFICIENCY
    prefill_tokens_per_s: float | None = None
    """Measured; takes the place of the estimate from operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSizes:
    """One codec's bytes, room and times. A *rank* is the one that holds most."""

    codec: str
    page_bytes: int
    first_page_bytes: int
    page_tokens: int
    layers: int
    sequence_bytes: int
    total_bytes: int
    rank_page_bytes: int
    rank_sequence_bytes: int
    sessions_per_gpu: float
    memory_bytes_per_node: int
    nvme_bytes_per_node: int
    restore_s: dict[str, float]
    """By link, for one sequence on otherwise idle links."""
    break_even_bytes_per_s: float
    """A shared link faster than this brings a sequence back sooner than it is computed."""

    @property
    def bytes_per_token(self) -> int | float:
        """Of a page behind the first, over its tokens."""
        return _over(self.page_bytes, self.page_tokens)

    @property
    def bytes_per_token_layer(self) -> int | float:
        return _over(self.page_bytes, self.page_tokens * self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to a request."""

    request: PlanRequest
    layout: Layout
    shards: ShardMap
    weight_bytes: int
    gpu_weight_bytes: int
    gpu_room_bytes: int
    """HBM left for KV on each GPU; 0 where the weights leave none."""
    recompute_s: float
    codecs: dict[str, CodecSizes]

    @property
    def page_count(self) -> int:
        """Pages of a sequence; a last page that is not full counts as one."""
        return -(-self.request.context_tokens // self.layout.page_tokens)

    def at_context(self, context_tokens: int) -> Plan:
        """The same plan for another length."""
        return make_plan(replace(self.request, context_tokens=context_tokens, tp=self.shards.tp))


def make_plan(request: PlanRequest) -> Plan:
    """Sizes ``request`` under every codec that its model's KV has.

    Raises:
        PlanError: sizes that contradict each other, or weights that fit nowhere.
    """
    model = request.model
    try:
        layout = model.layout(request.page_tokens, request.kv_dtype or model.kv_dtype)
        tp = request.tp or _smallest_tp(request, layout)
        layout = with_parts(layout, tp=[tp], pp=[request.pp])
        shards = ShardMap(layout, tp, request.pp)
    except (LayoutError, ShardError) as error:
        raise PlanError(str(error)) from None
    recompute_s = recompute_seconds(request, tp * request.pp)
    room_bytes = max(0, _gpu_room_bytes(request, tp))
    return Plan(
        request=request,
        layout=layout,
        shards=shards,
        weight_bytes=model.weight_bytes(request.weight_bits),
        gpu_weight_bytes=gpu_weight_bytes(request, tp),
        gpu_room_bytes=room_bytes,
        recompute_s=recompute_s,
        codecs={
            codec: _codec_sizes(codec, request, shards, room_bytes, recompute_s)
            for codec in CODECS
            if has_codec(codec, layout)
        },
    )


def recompute_seconds(request: PlanRequest, gpu_count: int) -> float:
    """Time to compute the KV of a sequence anew on ``gpu_count`` GPUs."""
    if request.prefill_tokens_per_s is not None:
        return request.context_tokens / request.prefill_tokens_per_s
    bits = request.weight_bits or request.model.weight_bits
    flops = request.gpu.flops(bits) * gpu_count * request.prefill_efficiency
    return request.model.prefill_flops(request.context_tokens) / flops


def _codec_sizes(
    codec: str, request: PlanRequest, shards: ShardMap, room_bytes: int, recompute_s: float
) -> CodecSizes:
    layout = shards.layout
    units = range(layout.unit_count)
    later_pages = -(-request.context_tokens // layout.page_tokens) - 1
    later = [unit_bytes(codec, layout, unit) for unit in units]
    first = [unit_bytes(codec, layout, unit, FIRST_PAGE) for unit in units]
    of_sequence = [head + later_pages * rest for head, rest in zip(first, later, strict=True)]
    slots = sum(
        _slot_bytes(head) + later_pages * _slot_bytes(rest)
        for head, rest in zip(first, later, strict=True)
    )
    ranks = shards.shards()
    rank_sequence = max(sum(of_sequence[unit] for unit in shard.units) for shard in ranks)
    sequence = sum(of_sequence)
    nvme_sessions = request.nvme_session_count
    if nvme_sessions is None:
        nvme_sessions = request.session_count
    return CodecSizes(
        codec=codec,
        page_bytes=sum(later),
        first_page_bytes=sum(first),
        page_tokens=layout.page_tokens,
        layers=layout.layers,
        sequence_bytes=sequence,
        total_bytes=sequence * request.session_count,
        rank_page_bytes=max(sum(later[unit] for unit in shard.units) for shard in ranks),
        rank_sequence_bytes=rank_sequence,
        sessions_per_gpu=room_bytes / rank_sequence / len(ranks),
        memory_bytes_per_node=-(-slots * request.session_count // request.node_count),
        nvme_bytes_per_node=-(-slots * nvme_sessions // request.node_count),
        restore_s={link.name: restore_seconds(link, sequence, rank_sequence) for link in LINKS},
        break_even_bytes_per_s=sequence / recompute_s,
    )


def restore_seconds(link: Link, sequence_bytes: int, rank_bytes: int) -> float:
    """Time for one sequence over an idle link. Ranks with links of their own load at once."""
    return (rank_bytes if link.is_per_gpu else sequence_bytes) / link.bytes_per_s


def _smallest_tp(request: PlanRequest, layout: Layout) -> int:
    fits_weights: int | None = None
    for tp in range(1, TP_MAX + 1):
        kv_heads = layout.kv_heads
        if request.model.heads % tp or (kv_heads % tp and tp % kv_heads):
            continue
        room = _gpu_room_bytes(request, tp)
        if room <= 0:
            continue
        fits_weights = fits_weights or tp
        shards = ShardMap(with_parts(layout, tp=[tp], pp=[request.pp]), tp, request.pp)
        if room >= _codec_sizes(RAW, request, shards, room, 1.0).rank_sequence_bytes:
            return tp
    if fits_weights is None:
        weights = request.model.weight_bytes(request.weight_bits)
        raise PlanError(
            f"weights of {weights / 1e9:,.0f} GB fit on no {TP_MAX} GPUs of "
            f"{request.gpu.hbm_bytes / 1e9:,.0f} GB: more stages (--pp), more groups that share "
            "experts (--dp), a larger GPU or narrower weights"
        )
    return fits_weights


def gpu_weight_bytes(request: PlanRequest, tp: int) -> int:
    """Weights on each GPU: routed experts spread over all of them, the rest over a group."""
    model = request.model
    total = model.weight_bytes(request.weight_bits)
    experts = total * model.expert_parameters // model.parameters
    group = tp * request.pp
    return -(-(total - experts) // group) - (-experts // (group * request.dp))


def _gpu_room_bytes(request: PlanRequest, tp: int) -> int:
    """HBM left for KV on each GPU; negative: the weights do not fit."""
    return int(request.gpu.hbm_bytes * request.hbm_share) - gpu_weight_bytes(request, tp)


def _slot_bytes(size_bytes: int) -> int:
    return -(-size_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def _over(total: int, count: int) -> int | float:
    """A whole number where it is one, so that exact sizes stay exact in JSON."""
    return total // count if total % count == 0 else total / count
