"""Bytes of units by codec and place in the chain, as the codecs themselves say."""

from __future__ import annotations

from typing import Final

from octavo.codec import Profile, RawCodec, codec_names
from octavo_proto.layout import Layout

RAW: Final = RawCodec.name
CODECS: Final = codec_names()

FIRST_PAGE: Final = 0
LATER_PAGE: Final = 1
"""All positions behind the first are packed alike."""


def has_codec(codec: str, layout: Layout) -> bool:
    """Whether ``codec`` packs the layout's KV; an engine's own 8-bit KV stays raw."""
    return Profile.named(codec).codec_at(layout, LATER_PAGE).name == codec


def unit_bytes(codec: str, layout: Layout, unit: int, position: int = LATER_PAGE) -> int:
    """Bytes of ``unit`` of the page at ``position``. Raises LayoutError: no such unit."""
    return Profile.named(codec).codec_at(layout, position).unit_bytes(layout, unit)
