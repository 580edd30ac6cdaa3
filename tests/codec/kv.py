"""Layouts and unit tensors for tests of codecs."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from octavo import Layout
from octavo.codec.base import unit_shape
from octavo_proto.layout import KvKind

DTYPES = ("bfloat16", "float16", "float32")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def gqa(dtype: str = "bfloat16", **fields: int) -> Layout:
    values = {"layers": 2, "kv_heads": 2, "head_dim": 8, **fields}
    return Layout(name="gqa", model="m", dtype=dtype, **values)  # type: ignore[arg-type]


def mla(dtype: str = "bfloat16", **fields: int) -> Layout:
    values = {"layers": 2, "kv_heads": 1, "head_dim": 160, "rope_dim": 8, **fields}
    return Layout(name="mla", model="m", kind=KvKind.MLA, dtype=dtype, **values)  # type: ignore[arg-type]


def torch_dtype(layout: Layout) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return dtype


def units(layout: Layout, pages: int, *, unit: int = 0, seed: int = 0, bias: float = 0) -> Tensor:
    """Normal values, each channel with a mean of its own."""
    generator = torch.Generator().manual_seed(seed)
    shape = (pages, *unit_shape(layout, unit))
    means = torch.randn((shape[-2], shape[-1]), generator=generator) * bias
    values = torch.randn(shape, generator=generator)
    if layout.kind is not KvKind.MLA:
        values += means
    return values.to(torch_dtype(layout))


def bits(values: Tensor) -> Tensor:
    """To compare, NaN and the sign of zero included."""
    return values.contiguous().view(BITS[values.element_size()])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of every kind that quantising codecs take; page_tokens of more than 16 among them."""
    fields = {
        "layers": draw(st.integers(1, 3)),
        "page_tokens": draw(st.sampled_from([16, 32, 48])),
    }
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        width = draw(st.sampled_from([1, 5, 128, 131, 256]))
        return mla(dtype, **fields, head_dim=width, rope_dim=draw(st.integers(0, 3)))
    heads = draw(st.integers(1, 4))
    return gqa(
        dtype,
        **fields,
        kv_heads=heads,
        head_dim=draw(st.sampled_from([1, 3, 8, 64])),
        head_parts=draw(st.integers(1, heads)),
    )


@st.composite
def unit_tensors(draw: st.DrawFn, layout: Layout) -> Tensor:
    """Values from ordinary to hostile: of one size or of all, biased, with holes of zeros, with
    NaN, infinities, subnormals and the largest numbers put in, and strided at will."""
    dtype = torch_dtype(layout)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), *unit_shape(layout, draw(st.integers(0, 0))))
    values = torch.randn(shape, generator=generator)
    size = draw(st.sampled_from(["ordinary", "biased", "small", "wide", "bits", "zeros", "steps"]))
    if size == "biased":
        values += torch.randn(shape[-1], generator=generator) * draw(st.sampled_from([3, 30, 400]))
    elif size == "small":
        values *= 2.0 ** -draw(st.integers(5, 40))
    elif size == "wide":
        values *= torch.exp2(torch.randn(shape, generator=generator) * 8)
    elif size == "zeros":
        values[values.abs() < 1] = 0.0
    elif size == "steps":
        values = values.round()
    values = values.to(dtype)
    if size == "bits":
        raw = torch.randint(-(2**31), 2**31, shape, generator=generator)
        values = raw.to(BITS[dtype.itemsize]).view(dtype)
    info = torch.finfo(dtype)
    special = [torch.nan, torch.inf, -torch.inf, info.max, info.min, info.tiny, 0.0, -0.0]
    special.append(float(info.tiny) / 8)
    flat = values.flatten()
    for number in draw(st.lists(st.sampled_from(special), max_size=4)):
        flat[draw(st.integers(0, flat.numel() - 1))] = number
    values = flat.view(shape)
    if draw(st.booleans()):  # strided: every other page and element of something larger
        values = torch.stack((values, values), -1).flatten(-2)[..., ::2]
    return values
