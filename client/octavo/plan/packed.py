"""Bytes of packed units, by codec."""

from __future__ import annotations

from typing import Final

from octavo_proto.layout import DTYPE_BYTES, KvKind, Layout

RAW: Final = "raw"
EXACT_TOKENS: Final = 16
"""Tokens at the head of a chain that every codec leaves as they are."""

_BITS: Final = {"fp8_e5m2": 8, "fp8_e4m3": 8, "int8": 8, "int6": 6, "int5": 5}
_INTEGERS: Final = ("int8", "int6", "int5")
CODECS: Final = (RAW, *_BITS)

_GROUP_TOKENS: Final = 16
_K_CHANNEL_BYTES: Final = 2  # scale and shift, one byte each, over a group of tokens
_FP16_BYTES: Final = 2
_MLA_TILE: Final = 128
_MLA_SCALE_BYTES: Final = 4
_MLA_ROPE_BYTES: Final = 2


def has_codec(codec: str, layout: Layout) -> bool:
    """Whether ``codec`` has a form for the layout's KV. An engine's own 8-bit KV stays raw."""
    if codec == RAW:
        return True
    return DTYPE_BYTES[layout.dtype] > 1


def unit_bytes(codec: str, layout: Layout, unit: int, token_count: int | None = None) -> int:
    """Bytes of ``unit`` with ``token_count`` tokens (default: a page's) under ``codec``."""
    tokens = layout.page_tokens if token_count is None else token_count
    if tokens == 0:
        return 0
    if codec == RAW:
        return layout.raw_unit_bytes(unit) * tokens // layout.page_tokens
    part = layout.unit_range(unit)
    layers = part.layer_end - part.layer_begin
    if layout.kind is KvKind.MLA:
        tiles = -(-layout.head_dim // _MLA_TILE)
        token_bytes = (
            layout.head_dim * _BITS[codec] // 8
            + tiles * _MLA_SCALE_BYTES
            + layout.rope_dim * _MLA_ROPE_BYTES
        )
        return layers * tokens * token_bytes
    values = -(-tokens * layout.head_dim * _BITS[codec] // 8)
    keys = values + -(-tokens // _GROUP_TOKENS) * layout.head_dim * _K_CHANNEL_BYTES
    token_parameters = _FP16_BYTES * (2 if codec in _INTEGERS else 1)
    heads = part.head_end - part.head_begin
    return layers * heads * (keys + values + tokens * token_parameters)


def first_unit_bytes(codec: str, layout: Layout, unit: int) -> int:
    """Bytes of ``unit`` in the first page of a chain: 16 exact tokens, the rest packed."""
    exact = unit_bytes(RAW, layout, unit, EXACT_TOKENS)
    return exact + unit_bytes(codec, layout, unit, layout.page_tokens - EXACT_TOKENS)
