"""``octavo bench codec``: bytes, speed and error of every codec.

Speed is of one thread, in bytes of the unpacked bfloat16 side, on the units of a rank of a 70B
model at TP 8. It is taken alternately with torch's own cast of as many e4m3 numbers to bfloat16,
``torch_cast_gbps``, which does without any scale; ``torch_cast_e5m2_gbps`` is the other format's,
which torch has vectorised. The memory of all results exists beforehand.

Errors are of pages behind the chain's first, against the bfloat16 that were packed;
``cast_e5m2`` and ``cast_e4m3`` are plain casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from octavo.bench.codec_inputs import (
    HEAD_DIM,
    KINDS,
    attention,
    attention_inputs,
    centred_error,
    relative_norm,
)
from octavo.bench.measuring import median, progress, seconds
from octavo.codec import Codec, codec_by_name, codec_names
from octavo.codec.base import unit_shape
from octavo.codec.roundtrip import BASELINES, roundtrip
from octavo_proto.layout import Layout

LAYOUT: Final = Layout(
    name="bench", model="bench-70b-rank", layers=80, kv_heads=1, head_dim=HEAD_DIM
)
PAGES: Final = 32
"""20 MiB of bfloat16: far more than a core's own caches."""

FP8_TYPES: Final = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


def run(*, pairs: int, pages: int = PAGES) -> Mapping[str, object]:
    """All figures. ``unpack_ratio`` is of ``torch_cast_gbps``, the median over pairs."""
    torch.set_num_threads(1)
    units = _units(pages)
    names = codec_names()
    casts = {name: _Cast(units, kind) for name, kind in FP8_TYPES.items()}
    figures: dict[str, dict[str, object]] = {}
    for name in progress(names, "speed", len(names)):
        figures[name] = _speed(codec_by_name(name), units, casts["e4m3"], pairs)
    for name in BASELINES:
        figures[name] = {"bytes_ratio": 0.5}
    for name, codec_figures in progress(list(figures.items()), "error", len(figures)):
        codec_figures.update(_errors(name))
    gbps = {
        name: units.nbytes / median([cast.seconds() for _ in range(pairs)]) / 1e9
        for name, cast in casts.items()
    }
    return {
        "head_dim": HEAD_DIM,
        "pairs": pairs,
        "torch_cast_gbps": gbps["e4m3"],
        "torch_cast_e5m2_gbps": gbps["e5m2"],
        "codecs": figures,
    }


def _units(pages: int) -> Tensor:
    """Ordinary KV, each channel with a mean of its own."""
    generator = torch.Generator().manual_seed(7)
    shape = (pages, *unit_shape(LAYOUT, 0))
    means = torch.randn((shape[-1],), generator=generator)
    return (torch.randn(shape, generator=generator) + means).to(torch.bfloat16)


class _Cast:
    """The ceiling: torch's cast of as many FP8 numbers."""

    def __init__(self, units: Tensor, kind: torch.dtype) -> None:
        self._packed = units.to(kind)
        self._target = torch.zeros_like(units)

    def seconds(self) -> float:
        return seconds(lambda: self._target.copy_(self._packed))


def _speed(codec: Codec, units: Tensor, cast: _Cast, pairs: int) -> dict[str, object]:
    packed = codec.pack(units, LAYOUT)
    target = torch.zeros_like(units)

    def unpack() -> Tensor:
        return codec.unpack(packed, LAYOUT, 0, target)

    unpack_s, ceiling_s = _taken_alternately(unpack, cast, pairs)
    pack_s = [seconds(lambda: codec.pack(units, LAYOUT)) for _ in range(max(3, pairs // 3))]
    return {
        "bytes_ratio": codec.unit_bytes(LAYOUT, 0) / LAYOUT.raw_unit_bytes(0),
        "pack_gbps": units.nbytes / median(pack_s) / 1e9,
        "unpack_gbps": units.nbytes / median(unpack_s) / 1e9,
        "unpack_ratio": median([b / a for a, b in zip(unpack_s, ceiling_s, strict=True)]),
    }


def _taken_alternately(
    work: Callable[[], object], cast: _Cast, pairs: int
) -> tuple[list[float], list[float]]:
    work()
    cast.seconds()
    taken: list[float] = []
    ceilings: list[float] = []
    for _ in range(pairs):
        taken.append(seconds(work))
        ceilings.append(cast.seconds())
    return taken, ceilings


def _errors(name: str) -> dict[str, object]:
    """By kind of input, relative errors of K and of what attention makes of both."""
    by_kind: dict[str, object] = {}
    for kind in KINDS:
        given = attention_inputs(kind)
        keys, values = _read_back(name, given.keys, given.values)
        exact = attention(given.queries, given.keys, given.values)
        got = attention(given.queries, keys, values)
        by_kind[kind] = {
            "k_centred_error": centred_error(keys, given.keys),
            "attention_error": relative_norm(got - exact, exact),
        }
    return by_kind


def _read_back(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K and V ``[heads, tokens, dim]`` as pages behind the first give them back."""
    heads, tokens, dim = keys.shape
    layout = Layout(name="bench", model="bench", layers=1, kv_heads=heads, head_dim=dim)
    both = torch.stack((keys, values))  # [2, heads, tokens, dim]
    page_tokens = layout.page_tokens
    pages = both.view(2, heads, -1, page_tokens, dim).permute(2, 0, 3, 1, 4)
    back = roundtrip(name, pages[:, None].contiguous(), layout, first_page=1)[:, 0]
    whole = back.permute(1, 3, 0, 2, 4).reshape(2, heads, tokens, dim)
    return whole[0], whole[1]
