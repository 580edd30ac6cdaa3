"""Codecs by their variant number."""

from __future__ import annotations

from typing import Final

from octavo.codec.base import Codec
from octavo.codec.raw import RawCodec
from octavo.errors import InvalidRequest

_CODECS: Final[dict[int, Codec]] = {codec.variant: codec for codec in (RawCodec(),)}


class UnknownVariant(InvalidRequest):
    """No codec of this client has that variant."""


def codec_of(variant: int) -> Codec:
    """The codec of a variant.

    Raises:
        UnknownVariant: the unit was packed by a newer client, or the number is wrong.
    """
    codec = _CODECS.get(variant)
    if codec is None:
        known = ", ".join(f"{codec.variant} ({codec.name})" for codec in _CODECS.values())
        raise UnknownVariant(f"variant {variant} is none of those known: {known}")
    return codec


def variants() -> tuple[int, ...]:
    """All variants that this client can read."""
    return tuple(_CODECS)
