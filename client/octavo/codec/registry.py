"""Codecs by variant and by name."""

from __future__ import annotations

from typing import Final

from octavo.codec.base import Codec
from octavo.codec.packed import PackedCodec
from octavo.codec.raw import RawCodec
from octavo.errors import InvalidRequest

SINK_TOKENS: Final = 16
"""The first tokens of a chain stay raw: they hold the attention sink, whose key has to be exact
(on a real model that is worth a factor of 1.5 to 5 in KL), and are the most shared of all."""

RAW: Final = RawCodec()

_PACKED: Final = (
    PackedCodec("fp8_e5m2", 2, "e5m2", 8),
    PackedCodec("fp8_e4m3", 3, "e4m3", 8),
    PackedCodec("int8", 4, "int", 8),
    PackedCodec("int6", 5, "int", 6),
    PackedCodec("int5", 6, "int", 5),
)

_FIRST_PAGE: Final = 32
"""Added to a codec's variant: its first page of a chain, where that is longer than the sink."""

_FIRST: Final = {
    codec.name: PackedCodec(
        codec.name, codec.variant + _FIRST_PAGE, codec.number, codec.bits, SINK_TOKENS
    )
    for codec in _PACKED
}

_BY_NAME: Final[dict[str, Codec]] = {codec.name: codec for codec in (RAW, *_PACKED)}
_BY_VARIANT: Final[dict[int, Codec]] = {
    codec.variant: codec for codec in (*_BY_NAME.values(), *_FIRST.values())
}


class UnknownVariant(InvalidRequest):
    """No codec of this client has that variant."""


class UnknownCodec(InvalidRequest):
    """No codec of this client has that name."""


def codec_of(variant: int) -> Codec:
    """The codec of a variant.

    Raises:
        UnknownVariant: the unit was packed by a newer client, or the number is wrong.
    """
    codec = _BY_VARIANT.get(variant)
    if codec is None:
        known = ", ".join(f"{codec.variant} ({codec.name})" for codec in _BY_VARIANT.values())
        raise UnknownVariant(f"variant {variant} is none of those known: {known}")
    return codec


def codec_by_name(name: str) -> Codec:
    """The codec of that name, as it packs all pages of a chain but the first.

    Raises:
        UnknownCodec: there is none.
    """
    codec = _BY_NAME.get(name)
    if codec is None:
        raise UnknownCodec(f"codec {name!r} is none of those known: {', '.join(_BY_NAME)}")
    return codec


def first_page_codec(name: str, page_tokens: int) -> Codec:
    """The codec of a chain's first page: its first 16 tokens are raw."""
    if name == RAW.name or page_tokens <= SINK_TOKENS:
        return RAW
    codec_by_name(name)
    return _FIRST[name]


def codec_names() -> tuple[str, ...]:
    """All names."""
    return tuple(_BY_NAME)


def variants() -> tuple[int, ...]:
    """All variants that this client can read."""
    return tuple(_BY_VARIANT)
