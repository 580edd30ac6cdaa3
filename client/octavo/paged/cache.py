"""An engine's paged KV cache: which tensors, and what their dimensions mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from octavo.errors import InvalidRequest
from octavo_proto.layout import DTYPE_BYTES, KvKind, Layout

ROLES: Final = frozenset({"layer", "kv", "block", "token", "head", "dim", "kv_dim", "latent"})
"""What a dimension can be. ``kv_dim`` is K and V fused in one dimension of 2 * head_dim;
``latent`` is MLA's latent and rotary part side by side. A *block* is the engine's own unit of
allocation, one or several pages long."""

_GQA: Final = ("block", "token", "head", "dim")
_MLA: Final = ("block", "token", "latent")
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class PagedKVError(InvalidRequest):
    """The tensors do not have the shape or type that layout and roles say."""


class PagedKV:
    """Views of an engine's cache in one order of dimensions, whatever its own order is.

    ``tensors`` has one tensor a layer, or a single one with a ``layer`` dimension. ``dims``
    names each dimension's role, in order, e.g. ``"kv block token head dim"`` or
    ``"block head token kv_dim"``. With ``values``, ``tensors`` holds K only and ``values`` V,
    both as ``dims`` says. Nothing is copied: strides may be anything.

    The cache may hold a part of the layout (a rank of tensor or pipeline parallelism): its
    first layer and head are ``layer_begin`` and ``head_begin``.

    Raises:
        PagedKVError: names the dimension or type that does not fit.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Tensor],
        dims: str,
        *,
        values: Sequence[Tensor] | None = None,
        layer_begin: int = 0,
        head_begin: int = 0,
    ) -> None:
        if layout.kind is KvKind.FOREIGN:
            raise PagedKVError("a foreign layout has no paged tensors")
        self.layout: Final = layout
        self.layer_begin: Final = layer_begin
        self.head_begin: Final = head_begin
        roles = _checked_roles(dims, layout.kind, separate=values is not None)
        keys = _by_layer(tensors, roles)
        if layout.kind is KvKind.MLA:
            sides = [[_ordered(tensor, roles, _MLA)] for tensor in keys]
        elif values is not None:
            sides = _pairs(keys, _by_layer(values, roles), roles)
        else:
            sides = [_split(tensor, roles) for tensor in keys]
        self._sides: Final = [[_as_bits(view, layout) for view in pair] for pair in sides]
        self._check_shapes()
        first = self._sides[0][0]
        self.block_count: Final = int(first.shape[0])
        self.block_tokens: Final = int(first.shape[1])
        self.head_count: Final = int(first.shape[2]) if layout.kind is KvKind.GQA else 1
        if self.block_tokens % layout.page_tokens:
            raise PagedKVError(
                f"token is {self.block_tokens}, must be a multiple of page_tokens "
                f"({layout.page_tokens})"
            )
        self.pages_per_block: Final = self.block_tokens // layout.page_tokens
        # [block, page in block, token, ...]: splitting one dimension never copies.
        split = (self.block_count, self.pages_per_block, layout.page_tokens, *first.shape[2:])
        self._paged: Final = [[view.view(split) for view in pair] for pair in self._sides]

    @property
    def device(self) -> torch.device:
        return self._sides[0][0].device

    @property
    def bits_dtype(self) -> torch.dtype:
        """The integer type as wide as the cache's own, in which bits are moved."""
        return self._sides[0][0].dtype

    def page_views(self, unit: int) -> list[list[Tensor]]:
        """By layer of ``unit`` and side (K, V; or the latent): views of shape
        ``[block, page in block, token, head, head_dim]``, or ``[..., token, latent]``.

        Raises:
            PagedKVError: the cache does not hold the unit, or the layout has no such unit.
        """
        if not 0 <= unit < self.layout.unit_count:
            raise PagedKVError(
                f"unit {unit}, the layout has units 0 to {self.layout.unit_count - 1}"
            )
        part = self.layout.unit_range(unit)
        layers = range(part.layer_begin - self.layer_begin, part.layer_end - self.layer_begin)
        first_head, end_head = part.head_begin - self.head_begin, part.head_end - self.head_begin
        if layers.start < 0 or layers.stop > len(self._paged):
            raise PagedKVError(f"the cache does not hold the layers of unit {unit}")
        if first_head < 0 or end_head > self.head_count:
            raise PagedKVError(f"the cache does not hold the heads of unit {unit}")
        if self.layout.kind is KvKind.MLA:
            return [self._paged[layer] for layer in layers]
        heads = slice(first_head, end_head)
        return [[view[:, :, :, heads] for view in self._paged[layer]] for layer in layers]

    def _check_shapes(self) -> None:
        layout, sides = self.layout, self._sides
        if self.layer_begin < 0 or self.layer_begin + len(sides) > layout.layers:
            raise PagedKVError(
                f"layer: {len(sides)} from {self.layer_begin} on, the layout has {layout.layers}"
            )
        is_mla = layout.kind is KvKind.MLA
        width = layout.head_dim + layout.rope_dim if is_mla else layout.head_dim
        shape = sides[0][0].shape
        if not is_mla and (self.head_begin < 0 or self.head_begin + shape[2] > layout.kv_heads):
            raise PagedKVError(
                f"head: {shape[2]} from {self.head_begin} on, the layout has {layout.kv_heads}"
            )
        if shape[-1] != width:
            name = "latent" if is_mla else "dim"
            raise PagedKVError(f"{name} is {shape[-1]}, the layout says {width}")
        for layer, pair in enumerate(sides):
            for view in pair:
                if view.shape != shape or view.device != sides[0][0].device:
                    raise PagedKVError(
                        f"layer {layer} has shape {tuple(view.shape)} on {view.device}, layer 0 "
                        f"{tuple(shape)} on {sides[0][0].device}"
                    )


def _checked_roles(dims: str, kind: KvKind, *, separate: bool) -> tuple[str, ...]:
    roles = tuple(dims.split())
    unknown = [role for role in roles if role not in ROLES]
    if unknown or len(set(roles)) != len(roles):
        raise PagedKVError(f"dims {dims!r}: roles are {', '.join(sorted(ROLES))}, each once")
    if kind is KvKind.MLA:
        allowed = [set(_MLA)]
        separate_is_wrong = separate
    else:
        whole = set(_GQA)
        fused = {"block", "token", "head", "kv_dim"}
        allowed = [whole] if separate else [whole | {"kv"}, fused]
        separate_is_wrong = False
    if set(roles) - {"layer"} not in allowed or separate_is_wrong:
        wanted = " or ".join(" ".join(sorted(roles)) for roles in allowed)
        raise PagedKVError(f"dims {dims!r} for {kind.name}: needs {wanted}; layer may be added")
    return roles


def _by_layer(tensors: Sequence[Tensor], roles: tuple[str, ...]) -> list[Tensor]:
    """One tensor a layer, without the layer dimension."""
    if not tensors:
        raise PagedKVError("no tensors")
    for tensor in tensors:
        if tensor.dim() != len(roles):
            raise PagedKVError(f"a tensor has {tensor.dim()} dimensions, dims names {len(roles)}")
    if "layer" not in roles:
        return list(tensors)
    if len(tensors) != 1:
        raise PagedKVError(f"{len(tensors)} tensors with a layer dimension each; give one")
    return list(tensors[0].unbind(roles.index("layer")))


def _ordered(tensor: Tensor, roles: tuple[str, ...], order: Sequence[str]) -> Tensor:
    left = [role for role in roles if role != "layer"]
    return tensor.permute([left.index(role) for role in order])


def _split(tensor: Tensor, roles: tuple[str, ...]) -> list[Tensor]:
    """K and V of one layer."""
    if "kv" in roles:
        both = _ordered(tensor, roles, ("kv", *_GQA))
        if both.shape[0] != 2:
            raise PagedKVError(f"kv is {both.shape[0]}, must be 2")
        return [both[0], both[1]]
    fused = _ordered(tensor, roles, ("block", "token", "head", "kv_dim"))
    if fused.shape[-1] % 2:
        raise PagedKVError(f"kv_dim is {fused.shape[-1]}, must be even")
    half = fused.shape[-1] // 2
    return [fused[..., :half], fused[..., half:]]


def _pairs(keys: list[Tensor], values: list[Tensor], roles: tuple[str, ...]) -> list[list[Tensor]]:
    if len(keys) != len(values):
        raise PagedKVError(f"{len(keys)} layers of K, {len(values)} of V")
    return [
        [_ordered(key, roles, _GQA), _ordered(value, roles, _GQA)]
        for key, value in zip(keys, values, strict=True)
    ]


def _as_bits(view: Tensor, layout: Layout) -> Tensor:
    expected: torch.dtype = getattr(torch, layout.dtype)
    if view.dtype != expected:
        raise PagedKVError(f"dtype is {view.dtype}, the layout says {layout.dtype}")
    return view.view(_BITS[DTYPE_BYTES[layout.dtype]])
