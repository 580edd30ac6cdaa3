"""What is measured: every codec behind its raw first tokens, and plain casts beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from octavo.codec import SINK_TOKENS, Profile, RawCodec, codec_names
from octavo.codec.roundtrip import BASELINES, roundtrip
from octavo.quality.errors import QualityError
from octavo_proto.layout import Layout


class Scheme(ABC):
    """A way to hold KV. Stateless.

    The first 16 tokens of a chain stay as they are in every scheme, casts included: they hold
    the attention sink. That is the stricter comparison, since casts gain most from it.
    """

    name: str

    @abstractmethod
    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        """What comes back of the first pages of a chain, float32
        ``[page, layer, 2, token, head, head_dim]``. ``layout`` is theirs, of one unit."""

    @abstractmethod
    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        """Bytes of the first pages of a chain whose engine has ``serving_layout``."""


class Bf16Scheme(Scheme):
    """KV rounded to bf16: what an engine itself loses against float32, and Octavo's ``raw``."""

    name = "cast_bf16"

    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        rounded = pages.to(torch.bfloat16).to(pages.dtype)
        rounded[0, :, :, :SINK_TOKENS] = pages[0, :, :, :SINK_TOKENS]
        return rounded

    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        return page_count * serving_layout.raw_page_bytes


class CastScheme(Scheme):
    """A plain cast to one byte an element, without scales, as ``bench codec`` has it too."""

    def __init__(self, name: str) -> None:
        self.name = name

    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        return roundtrip(self.name, pages, layout)

    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        token_bytes = serving_layout.raw_page_bytes // serving_layout.page_tokens
        cast_tokens = page_count * serving_layout.page_tokens - SINK_TOKENS
        # The engine's elements have two bytes.
        return SINK_TOKENS * token_bytes + cast_tokens * token_bytes // 2


class CodecScheme(Scheme):
    """A codec by the rule of profiles, through the bytes that a node would hold."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._profile: Final = Profile.named(name)

    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        return roundtrip(self.name, pages, layout)

    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        return sum(
            self._profile.page_bytes(serving_layout, position) for position in range(page_count)
        )


def all_schemes() -> tuple[Scheme, ...]:
    """Casts first, then codecs, in the order of their tables."""
    casts = [CastScheme(name) for name in BASELINES]
    codecs = [CodecScheme(name) for name in codec_names() if name != RawCodec.name]
    return (Bf16Scheme(), *casts, *codecs)


def choose_schemes(wanted: Sequence[str] | None) -> tuple[Scheme, ...]:
    """Schemes by name; None means all.

    Raises:
        QualityError: one of them does not exist, or comes twice.
    """
    known = {scheme.name: scheme for scheme in all_schemes()}
    if wanted is None:
        return tuple(known.values())
    for name in wanted:
        if name not in known:
            raise QualityError(f"no codec {name!r}, known: {', '.join(known)}")
    if len(set(wanted)) != len(wanted):
        raise QualityError("a codec is named twice")
    return tuple(known[name] for name in wanted)
