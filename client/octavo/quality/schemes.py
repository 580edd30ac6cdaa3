"""What is measured: every codec behind its raw first tokens, and plain casts beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from octavo.quality.errors import QualityError
from octavo_proto.layout import DTYPE_BYTES, Layout

RAW_TOKENS: Final = 16
"""The first tokens of a chain stay as they are in every scheme, casts included: they hold the
attention sink. That is the stricter comparison, since casts gain most from it."""


class Scheme(ABC):
    """A way to hold KV. Stateless."""

    name: str

    @abstractmethod
    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        """What comes back of the first pages of a chain, float32
        ``[page, layer, 2, token, head, head_dim]``. ``layout`` is theirs, of one unit."""

    @abstractmethod
    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        """Bytes of the first pages of a chain whose engine has ``serving_layout``."""


class CastScheme(Scheme):
    """Elements converted to a narrower type and back, saturating, without scales."""

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self._dtype: Final = dtype

    def round_trip(self, pages: Tensor, layout: Layout) -> Tensor:
        dtype: torch.dtype = getattr(torch, self._dtype)
        limit = torch.finfo(dtype).max
        cast = pages.clamp(-limit, limit).to(dtype).to(pages.dtype)
        cast[0, :, :, :RAW_TOKENS] = pages[0, :, :, :RAW_TOKENS]
        return cast

    def stored_bytes(self, serving_layout: Layout, page_count: int) -> int:
        token_bytes = serving_layout.raw_page_bytes // serving_layout.page_tokens
        serving_element = DTYPE_BYTES[serving_layout.dtype]
        cast_tokens = page_count * serving_layout.page_tokens - RAW_TOKENS
        cast_bytes = cast_tokens * token_bytes // serving_element * DTYPE_BYTES[self._dtype]
        return RAW_TOKENS * token_bytes + cast_bytes


CASTS: Final[tuple[Scheme, ...]] = (
    CastScheme("cast_bf16", "bfloat16"),
    CastScheme("cast_e5m2", "float8_e5m2"),
    CastScheme("cast_e4m3", "float8_e4m3fn"),
)


def all_schemes() -> tuple[Scheme, ...]:
    """Casts first, then codecs, in the order of their tables."""
    return CASTS


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
