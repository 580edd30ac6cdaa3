"""Packs and unpacks units, a piece that stays in a core's cache at a time.

A unit's values fall into *sides* that are quantised alike: K, V, or the tiles of MLA's latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from octavo.codec.bits import pack_bits, unpack_bits
from octavo.codec.channels import FloatChannels
from octavo.codec.elements import E4M3, E5M2
from octavo.codec.integer_channels import IntegerChannels
from octavo.codec.rows import AffineRows, Rows, ScaledRows
from octavo.codec.scratch import Scratch
from octavo.codec.sections import Sections
from octavo.codec.settle import Settler, clamped
from octavo_proto.layout import KvKind, Layout

if TYPE_CHECKING:
    from octavo.codec.packed import PackedCodec

UNPACK_ELEMENTS: Final = 1 << 19
"""Of a piece: 2 MiB of float32 stays near the core between the passes over it. Measured: half
the speed at 64 Ki elements, where the calls count, and no more at 1 Mi."""

PACK_ELEMENTS: Final = 1 << 20
"""Likewise; packing makes more calls, and falls off at 2 Mi."""


@dataclass(frozen=True)
class _Side:
    """Views: values ``[pages, layers, tokens, heads, dim]``, codes ``[pages, layers, groups,
    rows of bytes, heads * dim]``; parameters ``[pages, layers, ...]`` of their own memory."""

    rows: Rows
    values: Tensor
    codes: Tensor
    parameters: tuple[Tensor, ...]

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Of one page and layer, as ``Rows`` wants it."""
        _pages, _layers, tokens, heads, dim = self.values.shape
        if self.rows.dim == 1:
            return (tokens // 16, 16, heads * dim)
        return (1, tokens * heads, dim)

    def pieces(self, elements: int) -> Iterator[tuple[slice, slice]]:
        """Ranges of pages and layers in order, each small enough: several pages, or a part of
        one page's layers."""
        pages, layers = self.values.shape[:2]
        per_layer = prod(self.values.shape[2:])
        if not pages * layers * per_layer:
            return
        parts = -(-layers * per_layer // elements)
        page_step = max(1, elements // (layers * per_layer))
        layer_step = -(-layers // max(1, min(parts, layers)))
        for page in range(0, pages, page_step):
            for layer in range(0, layers, layer_step):
                yield slice(page, page + page_step), slice(layer, layer + layer_step)


def pack(codec: PackedCodec, sections: Sections, units: Tensor, layout: Layout) -> Tensor:
    """See ``Codec.pack``."""
    dtype = _dtype(layout)
    units = units.detach().view(dtype)
    pages, raw = units.shape[0], codec.raw_tokens
    data = torch.empty((pages, sections.size_bytes), dtype=torch.uint8, device=units.device)
    tokens_dim = 2 if layout.kind is KvKind.MLA else 3
    if raw:
        sections.write(data, "raw", units.narrow(tokens_dim, 0, raw))
        units = units.narrow(tokens_dim, raw, units.shape[tokens_dim] - raw)
    parameters = {
        name: sections.empty(data, name) for name in sections.names if name not in ("raw", "codes")
    }
    for side in _sides(codec, layout, units, sections.read(data, "codes"), parameters):
        _pack_side(codec, side, dtype)
    if "rope" in parameters:
        parameters["rope"].copy_(_to_16_bits(units[..., layout.head_dim :]))
    for name, values in parameters.items():
        sections.write(data, name, values)
    return data


def new_units(data: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
    """Memory for the units of packed bytes."""
    return torch.empty((data.shape[0], *shape), dtype=_dtype(layout), device=data.device)


def unpack(
    codec: PackedCodec, sections: Sections, data: Tensor, layout: Layout, units: Tensor
) -> None:
    """See ``Codec.unpack``; writes to ``units``."""
    dtype, raw = _dtype(layout), codec.raw_tokens
    tokens_dim = 2 if layout.kind is KvKind.MLA else 3
    if raw:
        first = units.narrow(tokens_dim, 0, raw)
        first.copy_(sections.read(data, "raw").contiguous().view(dtype).view(first.shape))
        units = units.narrow(tokens_dim, raw, units.shape[tokens_dim] - raw)
    parameters = {
        name: sections.read(data, name) for name in sections.names if name not in ("raw", "codes")
    }
    for side in _sides(codec, layout, units, sections.read(data, "codes"), parameters):
        _unpack_side(codec, side, dtype)
    if "rope" in parameters:
        rope = parameters["rope"]
        as_stored = torch.bfloat16 if dtype == torch.float32 else dtype
        units[..., layout.head_dim :].copy_(rope.view(as_stored))


def _pack_side(codec: PackedCodec, side: _Side, dtype: torch.dtype) -> None:
    pages, layers = side.values.shape[:2]
    groups, a, b = side.row_shape
    shape = (pages * layers * groups, a, b)
    settler = Settler(side.rows, dtype, shape, side.values.device)
    scratch, begin = Scratch(side.values.device), 0
    for piece in side.pieces(PACK_ELEMENTS):
        given = side.values[piece]
        values = scratch.take("given", given.shape, torch.float32).copy_(given).view(-1, a, b)
        settler.add(values, begin)
        begin += len(values)
    codes, found = settler.finish()
    width = side.codes.shape[-1]
    codes = codes.view(pages, layers, side.codes.shape[2], 16, width)
    for piece in side.pieces(PACK_ELEMENTS):
        target = side.codes[piece]
        packed = pack_bits(codes[piece].reshape(-1, 16, width), codec.bits)
        target.copy_(packed.view(target.shape))
    for whole, part in zip(side.parameters, found, strict=True):
        whole.copy_(part.view(whole.shape))


def _unpack_side(codec: PackedCodec, side: _Side, dtype: torch.dtype) -> None:
    line = side.rows.line(side.parameters)
    _n, a, b = side.row_shape
    of_rows = (-1, 1, b) if side.rows.dim == 1 else (-1, a, 1)
    scratch = Scratch(side.values.device)
    for piece in side.pieces(UNPACK_ELEMENTS):
        target, packed = side.values[piece], side.codes[piece]
        if codec.bits != 8:
            packed = unpack_bits(packed.flatten(0, 2), codec.bits, scratch)
        values = scratch.take("values", (target.numel() // (a * b), a, b), torch.float32)
        side.rows.dequantise(packed, line.part(*piece).reshape(*of_rows), values, scratch)
        target.copy_(clamped(values, dtype).view(target.shape))


def _sides(
    codec: PackedCodec,
    layout: Layout,
    units: Tensor,
    codes: Tensor,
    parameters: dict[str, Tensor],
) -> Iterator[_Side]:
    if layout.kind is KvKind.MLA:
        yield from _tiles(codec, layout, units, codes, parameters)
        return
    keys, values = _rows(codec.number, codec.bits)
    v_names = ("v_scale", "v_zero") if codec.number == "int" else ("v_scale",)
    yield _Side(
        keys, units[:, :, 0], codes[:, :, 0], (parameters["k_scale"], parameters["k_offset"])
    )
    yield _Side(values, units[:, :, 1], codes[:, :, 1], tuple(parameters[name] for name in v_names))


def _tiles(
    codec: PackedCodec,
    layout: Layout,
    units: Tensor,
    codes: Tensor,
    parameters: dict[str, Tensor],
) -> Iterator[_Side]:
    """Whole tiles as heads of 128, then the narrower one behind them, if there is one."""
    rows = _tile_rows(codec.number, codec.bits)
    names = ("scale", "zero") if codec.number == "int" else ("scale",)
    whole, rest = divmod(layout.head_dim, 128)
    for first, count, width in ((0, whole, 128), (whole, 1, rest)):
        if count and width:
            begin, end = first * 128, first * 128 + count * width
            latents = units[..., begin:end]
            yield _Side(
                rows,
                latents.view(*latents.shape[:-1], count, width),
                codes[..., begin:end],
                tuple(parameters[name][..., first : first + count] for name in names),
            )


@cache
def _rows(number: str, bits: int) -> tuple[Rows, Rows]:
    """How K and V are quantised."""
    if number == "int":
        return IntegerChannels(bits), AffineRows(bits)
    elements = E4M3() if number == "e4m3" else E5M2()
    return FloatChannels(elements), ScaledRows(elements, torch.float16)


BFLOAT16_NAN: Final = 0x7FC0
"""The NaN that stands for every NaN of float32 in the rotary part of MLA."""


@cache
def _tile_rows(number: str, bits: int) -> Rows:
    if number == "int":
        return AffineRows(bits)
    return ScaledRows(E4M3() if number == "e4m3" else E5M2(), torch.float32)


def _to_16_bits(rope: Tensor) -> Tensor:
    """The engine's 16 bits as they are; bfloat16 of float32."""
    if rope.dtype != torch.float32:
        return rope.contiguous().view(torch.int16)
    # Which NaN a conversion makes depends on the instructions that torch chose for the shape.
    stored = rope.to(torch.bfloat16).contiguous().view(torch.int16)
    return stored.masked_fill(rope.isnan(), BFLOAT16_NAN)


def _dtype(layout: Layout) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return dtype
