"""What a reader gets of a chain's pages: for measuring quality. Needs torch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.codec.profile import Profile
from octavo.codec.registry import SINK_TOKENS
from octavo_proto.layout import KvKind, Layout

_CASTS: Final = {"cast_e5m2": torch.float8_e5m2, "cast_e4m3": torch.float8_e4m3fn}

BASELINES: Final = tuple(_CASTS)
"""Plain casts to FP8, to compare with: no codecs, no page is stored so."""


def roundtrip(
    name: str, units: Tensor, layout: Layout, *, first_page: int = 0, rounds: int = 1
) -> Tensor:
    """Pages ``first_page`` and on of a chain, packed and unpacked ``rounds`` times.

    ``name`` is a codec's, a profile's or one of ``BASELINES``; ``units`` is a unit tensor of the
    layout's dtype (see ``Codec``) and is left as it is. The first 16 tokens of the chain come
    back exactly, whatever the name.
    """
    dtype: torch.dtype = getattr(torch, layout.dtype)
    units = units.view(dtype)
    if name in _CASTS:
        # Saturating, as engines cast; torch alone would make NaN or infinity.
        largest = torch.finfo(_CASTS[name]).max
        cast = units.clamp(-largest, largest).to(_CASTS[name]).to(dtype)
        if first_page == 0 and units.shape[0]:
            tokens_dim = 1 if layout.kind is KvKind.MLA else 2
            cast[0].narrow(tokens_dim, 0, SINK_TOKENS).copy_(
                units[0].narrow(tokens_dim, 0, SINK_TOKENS)
            )
        return cast
    profile = Profile.named(name)
    unit = _unit_of_shape(units, layout)
    out = units.clone()
    for begin, end in ((0, 1), (1, units.shape[0])) if first_page == 0 else ((0, units.shape[0]),):
        codec = profile.codec_at(layout, first_page + begin)
        for _ in range(rounds):
            out[begin:end] = codec.unpack(codec.pack(out[begin:end], layout), layout, unit)
    return out


def _unit_of_shape(units: Tensor, layout: Layout) -> int:
    """The first unit of that shape: units of one shape are packed alike."""
    from octavo.codec.base import unit_shape

    for unit in range(layout.unit_count):
        if unit_shape(layout, unit) == tuple(units.shape[1:]):
            return unit
    raise ValueError(f"no unit of layout {layout.name!r} has the shape {tuple(units.shape[1:])}")
