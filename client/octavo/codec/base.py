"""What every codec does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from octavo_proto.layout import KvKind, Layout, LayoutError

if TYPE_CHECKING:
    from torch import Tensor


class Codec(ABC):
    """Packs units of several pages at once. Stateless; usable by several threads.

    A *unit tensor* is what the engine has: ``[pages, layers, 2, tokens, heads, head_dim]`` for
    GQA (K before V), ``[pages, layers, tokens, latent + rope]`` for MLA, of the layout's dtype
    or of an integer type of the same width (the same bits under another name). Packed, it is
    uint8 ``[pages, unit_bytes]``. Both may be strided in ``pages``, on any device.

    Packing what was unpacked gives the same bytes again, so a page that is evicted and saved
    again does not decay.
    """

    name: str
    variant: int
    """The number of codec and version in the protocol. Never reused; 0 means unspecified."""

    @abstractmethod
    def unit_bytes(self, layout: Layout, unit: int) -> int:
        """Bytes of a packed unit. Raises LayoutError for a unit the layout does not have."""

    @abstractmethod
    def pack(self, units: Tensor, layout: Layout) -> Tensor:
        """The packed bytes of a unit tensor; may share its memory.

        Raises:
            LayoutError: the codec has no format for the layout's dtype or kind.
        """

    @abstractmethod
    def unpack(self, data: Tensor, layout: Layout, unit: int, out: Tensor | None = None) -> Tensor:
        """The unit tensor of packed bytes, of the layout's dtype.

        Written to ``out`` if that is given, of the result's shape and dtype: the memory of a
        large new tensor costs as much as unpacking into it. Else it may share ``data``'s memory.
        """


def unit_shape(layout: Layout, unit: int) -> tuple[int, ...]:
    """Shape of one page of a unit tensor, without the leading ``pages``.

    Raises:
        LayoutError: foreign layouts have none, and there is no such unit.
    """
    if layout.kind is KvKind.FOREIGN:
        raise LayoutError("the units of a foreign layout have no shape")
    if not 0 <= unit < layout.unit_count:
        raise LayoutError(f"unit {unit}, the layout has units 0 to {layout.unit_count - 1}")
    part = layout.unit_range(unit)
    layers = part.layer_end - part.layer_begin
    if layout.kind is KvKind.MLA:
        return (layers, layout.page_tokens, layout.head_dim + layout.rope_dim)
    heads = part.head_end - part.head_begin
    return (layers, 2, layout.page_tokens, heads, layout.head_dim)
