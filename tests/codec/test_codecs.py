"""What holds for every codec; each new one joins by being registered."""

from __future__ import annotations

import pytest
import torch

from octavo import Layout, LayoutError, foreign_layout
from octavo.codec import Codec, UnknownVariant, codec_of, variants
from octavo.codec.base import unit_shape
from octavo_proto.layout import DTYPE_BYTES, KvKind

GQA = Layout(name="gqa", model="m", layers=5, kv_heads=4, head_dim=8, layer_parts=2, head_parts=2)
MLA = Layout(name="mla", model="m", kind=KvKind.MLA, layers=3, kv_heads=1, head_dim=16, rope_dim=4)


def unit_tensor(layout: Layout, unit: int, pages: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(unit)
    values = torch.randn((pages, *unit_shape(layout, unit)), generator=generator)
    return values.to(getattr(torch, layout.dtype))


@pytest.fixture(params=variants())
def codec(request: pytest.FixtureRequest) -> Codec:
    return codec_of(request.param)


@pytest.mark.parametrize("layout", [GQA, MLA], ids=["gqa", "mla"])
class TestEveryCodec:
    def test_packed_units_have_the_bytes_that_the_codec_states(
        self, codec: Codec, layout: Layout
    ) -> None:
        for unit in range(layout.unit_count):
            packed = codec.pack(unit_tensor(layout, unit, 3))
            assert packed.dtype == torch.uint8
            assert tuple(packed.shape) == (3, codec.unit_bytes(layout, unit))

    def test_packing_what_was_unpacked_gives_the_same_bytes(
        self, codec: Codec, layout: Layout
    ) -> None:
        for unit in range(layout.unit_count):
            packed = codec.pack(unit_tensor(layout, unit, 2))
            unpacked = codec.unpack(packed, layout, unit, None)
            assert unpacked.shape == (2, *unit_shape(layout, unit))
            assert torch.equal(codec.pack(unpacked), packed)

    def test_pages_are_packed_independently(self, codec: Codec, layout: Layout) -> None:
        units = unit_tensor(layout, 0, 4)
        assert torch.equal(codec.pack(units)[2], codec.pack(units[2:3])[0])

    def test_a_unit_that_the_layout_does_not_have_is_refused(
        self, codec: Codec, layout: Layout
    ) -> None:
        with pytest.raises(LayoutError, match=str(layout.unit_count)):
            codec.unit_bytes(layout, layout.unit_count)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_raw_is_the_identity_on_bits_of_every_dtype(dtype: str) -> None:
    layout = Layout(name="l", model="m", layers=2, kv_heads=2, head_dim=4, dtype=dtype)
    raw = codec_of(1)
    bits = torch.arange(raw.unit_bytes(layout, 0), dtype=torch.int64).to(torch.uint8)[None]
    unpacked = raw.unpack(bits, layout, 0, None)
    assert unpacked.dtype == getattr(torch, dtype)
    assert torch.equal(raw.pack(unpacked), bits)


def test_raw_orders_layer_side_token_head_dim() -> None:
    layout = Layout(name="l", model="m", layers=2, kv_heads=2, head_dim=4, dtype="uint8")
    unit = torch.zeros((1, *unit_shape(layout, 0)), dtype=torch.uint8)
    unit[0, 1, 0, 3, 1, 2] = 7  # layer 1, K, token 3, head 1, element 2
    place = (((1 * 2 + 0) * 16 + 3) * 2 + 1) * 4 + 2
    packed = codec_of(1).pack(unit)
    assert packed[0, place] == 7
    assert int(packed.sum()) == 7


def test_an_unknown_variant_is_refused_by_number() -> None:
    with pytest.raises(UnknownVariant, match="variant 999"):
        codec_of(999)
    with pytest.raises(UnknownVariant):
        codec_of(0)


def test_a_foreign_layout_has_no_unit_shape() -> None:
    with pytest.raises(LayoutError, match="foreign"):
        codec_of(1).unit_bytes(foreign_layout("f", "lmcache"), 0)
