"""The codecs that quantise. docs/codecs.md specifies their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from octavo.codec.base import Codec, unit_shape
from octavo.codec.sections import Sections
from octavo_proto.layout import DTYPE_BYTES, KvKind, Layout, LayoutError

if TYPE_CHECKING:
    from torch import Tensor

GROUP_TOKENS: Final = 16
"""K's channels have a scale over so many tokens, whatever page_tokens is. Rotated K drifts with
position, so longer groups would cost quality; and bytes per token do not depend on the page."""

TILE_WIDTH: Final = 128
"""Elements of MLA's latent that share a scale."""

PACKED_DTYPES: Final = ("bfloat16", "float16", "float32")
"""What an engine has in 8 bits already is never quantised a second time."""


@dataclass(frozen=True)
class PackedCodec(Codec):
    """``bits`` a value: FP8 (``e5m2``, ``e4m3``) or integers (``int``).

    The first ``raw_tokens`` tokens of each page are raw, the rest is packed.
    """

    name: str
    variant: int
    number: Literal["e5m2", "e4m3", "int"]
    bits: int
    raw_tokens: int = 0

    def unit_bytes(self, layout: Layout, unit: int) -> int:
        return self.sections(layout, unit_shape(layout, unit)).size_bytes

    def pack(self, units: Tensor, layout: Layout) -> Tensor:
        from octavo.codec.packing import pack

        return pack(self, self.sections(layout, tuple(units.shape[1:])), units, layout)

    def unpack(self, data: Tensor, layout: Layout, unit: int, out: Tensor | None = None) -> Tensor:
        from octavo.codec.packing import new_units, unpack

        shape = unit_shape(layout, unit)
        units = new_units(data, layout, shape) if out is None else out
        unpack(self, self.sections(layout, shape), data, layout, units)
        return units

    def sections(self, layout: Layout, shape: tuple[int, ...]) -> Sections:
        """The parts of a packed unit of that shape.

        Raises:
            LayoutError: there is no such format.
        """
        if layout.dtype not in PACKED_DTYPES:
            raise LayoutError(
                f"codec {self.name} packs {', '.join(PACKED_DTYPES)}; layout {layout.name!r} has "
                f"{layout.dtype}, which only codec raw leaves as it is"
            )
        if layout.page_tokens <= self.raw_tokens:
            raise LayoutError(
                f"variant {self.variant} keeps {self.raw_tokens} tokens of a page raw, a page of "
                f"layout {layout.name!r} has {layout.page_tokens}: its variant is raw"
            )
        sections = Sections()
        if layout.kind is KvKind.MLA:
            self._add_latents(sections, layout, shape)
        else:
            self._add_keys_and_values(sections, layout, shape)
        return sections

    def _add_keys_and_values(
        self, sections: Sections, layout: Layout, shape: tuple[int, ...]
    ) -> None:
        layers, _sides, tokens, heads, dim = shape
        if self.raw_tokens:
            raw_bytes = 2 * self.raw_tokens * heads * dim * DTYPE_BYTES[layout.dtype]
            sections.add("raw", (layers, raw_bytes))
        tokens -= self.raw_tokens
        groups, width = tokens // GROUP_TOKENS, heads * dim
        sections.add("codes", (layers, 2, groups, 2 * self.bits, width))
        sections.add("k_scale", (layers, groups, width))
        sections.add("k_offset", (layers, groups, width))
        sections.add("v_scale", (layers, tokens, heads), "float16")
        if self.number == "int":
            sections.add("v_zero", (layers, tokens, heads), "float16")

    def _add_latents(self, sections: Sections, layout: Layout, shape: tuple[int, ...]) -> None:
        layers, tokens, width = shape
        if self.raw_tokens:
            sections.add("raw", (layers, self.raw_tokens * width * DTYPE_BYTES[layout.dtype]))
        tokens -= self.raw_tokens
        groups, tiles = tokens // GROUP_TOKENS, -(-layout.head_dim // TILE_WIDTH)
        sections.add("codes", (layers, groups, 2 * self.bits, layout.head_dim))
        if self.number == "int":
            sections.add("scale", (layers, tokens, tiles), "float16")
            sections.add("zero", (layers, tokens, tiles), "float16")
        else:
            sections.add("scale", (layers, tokens, tiles), "float32")
        sections.add("rope", (layers, tokens, layout.rope_dim), "int16")
