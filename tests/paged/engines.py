"""Engine caches of all shapes, and a plain reference that reads and writes them token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from octavo import Layout
from octavo.paged import PagedKV
from octavo_proto.layout import KvKind

GQA_DIMS = (
    "kv block token head dim",  # FlashAttention style
    "block kv token head dim",
    "kv block head token dim",
    "block head token kv_dim",  # K and V side by side
    "block token head kv_dim",
    "layer kv block token head dim",
    "block layer head token kv_dim",
)
SEPARATE_DIMS = ("block token head dim", "layer block head token dim", "head dim block token")
MLA_DIMS = ("block token latent", "layer block token latent", "token block latent")


@dataclass
class Engine:
    """``tensors`` (and ``values``) as given to PagedKV."""

    layout: Layout
    dims: str
    tensors: list[Tensor]
    values: list[Tensor] | None

    def paged(self) -> PagedKV:
        return PagedKV(self.layout, self.tensors, self.dims, values=self.values)

    def element(self, layer: int, side: int, block: int, token: int, head: int) -> Tensor:
        """The vector of one token, layer, side and head: a view, found by plain indexing."""
        roles = self.dims.split()
        own_values = self.values is not None and side == 1
        tensors = self.values if own_values and self.values is not None else self.tensors
        tensor = tensors[0] if "layer" in roles else tensors[layer]
        where = {"layer": layer, "kv": side, "block": block, "token": token, "head": head}
        vector = tensor[tuple(where.get(role, slice(None)) for role in roles)]
        if "kv_dim" in roles:
            width = self.layout.head_dim
            return vector[side * width : (side + 1) * width]
        return vector

    def page_bytes(self, unit: int, table: list[int], block_tokens: int, page: int) -> bytes:
        """Canonical bytes of a unit, by definition."""
        layout, part = self.layout, self.layout.unit_range(unit)
        sides = 1 if layout.kind is KvKind.MLA else 2
        vectors = [
            self.element(layer, side, table[token // block_tokens], token % block_tokens, head)
            for layer in range(part.layer_begin, part.layer_end)
            for side in range(sides)
            for token in range(page * layout.page_tokens, (page + 1) * layout.page_tokens)
            for head in range(part.head_begin, part.head_end)
        ]
        return torch.cat(vectors).contiguous().view(torch.uint8).numpy().tobytes()


@st.composite
def engines(draw: st.DrawFn) -> tuple[Engine, int]:
    """An engine cache of random shape, role order and strides, and its tokens a block."""
    is_mla = draw(st.booleans())
    pages_per_block = draw(st.integers(1, 3))
    page_tokens = draw(st.sampled_from([16, 32]))
    layers = draw(st.integers(1, 3))
    heads = 1 if is_mla else draw(st.integers(1, 3))
    layout = Layout(
        name="l",
        model="m",
        kind=KvKind.MLA if is_mla else KvKind.GQA,
        layers=layers,
        kv_heads=heads,
        head_dim=draw(st.integers(1, 5)),
        rope_dim=draw(st.integers(0, 3)) if is_mla else 0,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])),
        page_tokens=page_tokens,
        layer_parts=draw(st.integers(1, layers)),
        head_parts=draw(st.integers(1, heads)),
    )
    separate = not is_mla and draw(st.booleans())
    choices = MLA_DIMS if is_mla else SEPARATE_DIMS if separate else GQA_DIMS
    dims = draw(st.sampled_from(choices))
    sizes = {
        "layer": layers,
        "kv": 2,
        "block": draw(st.integers(1, 4)),
        "token": pages_per_block * page_tokens,
        "head": heads,
        "dim": layout.head_dim,
        "kv_dim": 2 * layout.head_dim,
        "latent": layout.head_dim + layout.rope_dim,
    }
    shape = [sizes[role] for role in dims.split()]
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.integers(0, 2))
    seed = draw(st.integers(0, 2**16))
    count = 1 if "layer" in dims.split() else layers

    def tensors(first_seed: int) -> list[Tensor]:
        return [
            strided(shape, list(order), gap, getattr(torch, layout.dtype), first_seed + index)
            for index in range(count)
        ]

    engine = Engine(layout, dims, tensors(seed), tensors(seed + 100) if separate else None)
    return engine, sizes["token"]


def strided(shape: list[int], order: list[int], gap: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of ``shape`` whose dimensions lie in memory in ``order``, ``gap`` elements apart."""
    generator = torch.Generator().manual_seed(seed)
    stored = [shape[dim] for dim in order]
    stored[-1] += gap
    width = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 120, (*stored[:-1], stored[-1] * width), generator=generator)
    tensor = data.to(torch.uint8).view(dtype)[..., : stored[-1] - gap]
    return tensor.permute([order.index(dim) for dim in range(len(shape))])
