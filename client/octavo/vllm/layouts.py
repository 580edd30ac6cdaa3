"""An engine's KV group as an Octavo layout. Pure: reads neither vLLM nor tensors.

On GPUs a page is 16 tokens in canonical order, whatever the engine's block size, so engines of
different block sizes share pages. A CPU engine's K lies in an order that depends on the
instruction set: its blocks are opaque, and a page is one whole block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.codec import Profile
from octavo.codec.registry import RAW
from octavo.errors import InvalidRequest
from octavo.shards import ShardMap, with_parts
from octavo.vllm.errors import EngineRefused
from octavo.vllm.settings import ConnectorSettings
from octavo_proto.layout import KvKind, Layout, LayoutError
from octavo_proto.limits import PAGE_TOKENS_MAX, PAGE_TOKENS_STEP

NAME_MODEL_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKv:
    """What an engine says about its KV."""

    model: str
    weights_revision: str
    weights_quantisation: str = ""
    kind: KvKind = KvKind.GQA
    layer_names: tuple[str, ...]
    """In the order of the model."""
    kv_heads: int
    """Over all ranks."""
    head_dim: int
    rope_dim: int = 0
    dtype: str
    kv_scales: str = ""
    rope: str = ""
    block_tokens: int
    opaque_form: str = ""
    """Names the order of bytes in a block where only like engines understand it."""
    tp: int = 1
    tp_rank: int = 0

    @property
    def is_opaque(self) -> bool:
        return bool(self.opaque_form)


def layout_of(kv: EngineKv, settings: ConnectorSettings, epoch: int) -> Layout:
    """The layout of the engine's pages, cut into a unit for each part of the KV heads.

    Raises:
        EngineRefused: names what cannot be cut into pages.
    """
    if kv.is_opaque and Profile.named(settings.profile).codec_name != RAW.name:
        raise EngineRefused(
            f"kv_connector_extra_config: profile is {settings.profile!r}, must be 'exact': only "
            "this backend knows the order of bytes in its blocks, so they cannot be packed"
        )
    try:
        layout = Layout(
            name="engine",
            model=kv.model,
            weights_revision=kv.weights_revision,
            weights_quantisation=kv.weights_quantisation,
            kind=kv.kind,
            layers=len(kv.layer_names),
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            rope_dim=kv.rope_dim,
            dtype=kv.dtype,
            kv_scales=kv.kv_scales,
            rope=kv.rope,
            page_tokens=_page_tokens(kv, settings),
            physical_form=kv.opaque_form or "canonical",
        )
        layout = with_parts(layout, tp=sorted({kv.tp, *settings.tp_sizes}))
        ShardMap(layout, kv.tp)
    except (LayoutError, InvalidRequest) as error:
        raise EngineRefused(f"the engine's KV cannot be cut into pages: {error}") from None
    # A node knows one layout under a name, so the name says all of it but the epoch.
    name = f"vllm-{kv.model[-NAME_MODEL_CHARS:]}-{layout.fingerprint().hex()[:12]}"
    return replace(layout, name=name, weights_epoch=epoch)


def _page_tokens(kv: EngineKv, settings: ConnectorSettings) -> int:
    if kv.is_opaque:
        if kv.block_tokens % PAGE_TOKENS_STEP or kv.block_tokens > PAGE_TOKENS_MAX:
            raise EngineRefused(
                f"block_size is {kv.block_tokens}: a block of this backend is one page, which has "
                f"a multiple of {PAGE_TOKENS_STEP} tokens, at most {PAGE_TOKENS_MAX}"
            )
        return kv.block_tokens
    if kv.block_tokens % settings.page_tokens:
        raise EngineRefused(
            f"page_tokens is {settings.page_tokens}, must divide the engine's block_size "
            f"({kv.block_tokens})"
        )
    return settings.page_tokens
