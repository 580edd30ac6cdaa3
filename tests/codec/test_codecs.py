"""What holds for every codec; each new one joins by being registered."""

from __future__ import annotations

import pytest
import torch
from tests.codec.kv import bits, gqa, mla, units

from octavo import Layout, LayoutError, foreign_layout
from octavo.codec import Codec, UnknownVariant, codec_by_name, codec_names, codec_of, variants
from octavo.codec.base import unit_shape
from octavo_proto.layout import DTYPE_BYTES

LAYOUTS = (
    gqa(layers=5, kv_heads=4, layer_parts=2, head_parts=2, page_tokens=32),
    mla(layers=3, page_tokens=32),
    gqa("float32", page_tokens=48),
    mla("float16", head_dim=256, page_tokens=48),
)


@pytest.fixture(params=variants())
def codec(request: pytest.FixtureRequest) -> Codec:
    return codec_of(request.param)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.dtype}")
class TestEveryCodec:
    def test_packed_units_have_the_bytes_that_the_codec_states(
        self, codec: Codec, layout: Layout
    ) -> None:
        for unit in range(layout.unit_count):
            packed = codec.pack(units(layout, 3, unit=unit), layout)
            assert packed.dtype == torch.uint8
            assert tuple(packed.shape) == (3, codec.unit_bytes(layout, unit))

    def test_packing_what_was_unpacked_gives_the_same_bytes(
        self, codec: Codec, layout: Layout
    ) -> None:
        for unit in range(layout.unit_count):
            packed = codec.pack(units(layout, 2, unit=unit), layout)
            unpacked = codec.unpack(packed, layout, unit)
            assert unpacked.shape == (2, *unit_shape(layout, unit))
            assert str(unpacked.dtype) == f"torch.{layout.dtype}"
            assert torch.equal(codec.pack(unpacked, layout), packed)

    def test_pages_are_packed_independently(self, codec: Codec, layout: Layout) -> None:
        values = units(layout, 4)
        assert torch.equal(codec.pack(values, layout)[2], codec.pack(values[2:3], layout)[0])

    def test_integers_of_the_same_width_are_the_same_bits(
        self, codec: Codec, layout: Layout
    ) -> None:
        values = units(layout, 2)
        assert torch.equal(codec.pack(bits(values), layout), codec.pack(values, layout))

    def test_values_stay_as_they_are(self, codec: Codec, layout: Layout) -> None:
        values = units(layout, 2)
        before = values.clone()
        packed = codec.pack(values, layout)
        kept = packed.clone()
        codec.unpack(packed, layout, 0).zero_()
        assert torch.equal(values, before) or codec.name == "raw"
        assert torch.equal(packed, kept) or codec.name == "raw"

    def test_pages_may_lie_apart_and_at_odd_addresses(self, codec: Codec, layout: Layout) -> None:
        packed = codec.pack(units(layout, 3), layout)
        room = codec.unit_bytes(layout, 0) + 64
        apart = torch.zeros((3, room), dtype=torch.uint8)[:, 32 : 32 + packed.shape[1]]
        apart.copy_(packed)
        expected = codec.unpack(packed, layout, 0)
        assert torch.equal(codec.unpack(apart, layout, 0), expected)
        into = torch.empty_like(expected)
        assert codec.unpack(apart, layout, 0, into) is into
        assert torch.equal(into, expected)

    def test_pages_need_no_gradients_to_be_turned_off(self, codec: Codec, layout: Layout) -> None:
        values = units(layout, 2)
        packed = codec.pack(values.clone().requires_grad_(), layout)
        assert torch.equal(packed, codec.pack(values, layout))
        assert not packed.requires_grad

    def test_no_pages_are_no_bytes(self, codec: Codec, layout: Layout) -> None:
        packed = codec.pack(units(layout, 0), layout)
        assert packed.shape == (0, codec.unit_bytes(layout, 0))
        assert codec.unpack(packed, layout, 0).shape == (0, *unit_shape(layout, 0))

    def test_a_unit_that_the_layout_does_not_have_is_refused(
        self, codec: Codec, layout: Layout
    ) -> None:
        with pytest.raises(LayoutError, match=str(layout.unit_count)):
            codec.unit_bytes(layout, layout.unit_count)


@pytest.mark.parametrize("variant", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.dtype}")
def test_a_first_page_keeps_its_first_16_tokens_and_packs_the_rest_alike(
    variant: int, layout: Layout
) -> None:
    values = units(layout, 2)
    first, rest = codec_of(variant + 32), codec_of(variant)
    assert first.name == rest.name
    got = first.unpack(first.pack(values, layout), layout, 0)
    others = rest.unpack(rest.pack(values, layout), layout, 0)
    tokens = 2 if layout.name == "mla" else 3
    assert torch.equal(got.narrow(tokens, 0, 16), values.narrow(tokens, 0, 16))
    behind = layout.page_tokens - 16
    assert torch.equal(got.narrow(tokens, 16, behind), others.narrow(tokens, 16, behind))


def test_variants_are_numbered_once_and_for_all() -> None:
    assert {name: codec_by_name(name).variant for name in codec_names()} == {
        "raw": 1,
        "fp8_e5m2": 2,
        "fp8_e4m3": 3,
        "int8": 4,
        "int6": 5,
        "int5": 6,
    }
    assert variants() == (1, 2, 3, 4, 5, 6, 34, 35, 36, 37, 38)


@pytest.mark.parametrize("name", codec_names()[1:])
def test_bytes_of_an_engine_that_quantises_are_left_alone(name: str) -> None:
    for dtype in ("float8_e4m3fn", "uint8"):
        with pytest.raises(LayoutError, match="only codec raw"):
            codec_by_name(name).unit_bytes(gqa(dtype), 0)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_raw_is_the_identity_on_bits_of_every_dtype(dtype: str) -> None:
    layout = gqa(dtype)
    raw = codec_of(1)
    values = torch.arange(raw.unit_bytes(layout, 0), dtype=torch.int64).to(torch.uint8)[None]
    unpacked = raw.unpack(values, layout, 0)
    assert unpacked.dtype == getattr(torch, dtype)
    assert torch.equal(raw.pack(unpacked, layout), values)


def test_raw_orders_layer_side_token_head_dim() -> None:
    layout = gqa("uint8", head_dim=4)
    unit = torch.zeros((1, *unit_shape(layout, 0)), dtype=torch.uint8)
    unit[0, 1, 0, 3, 1, 2] = 7  # layer 1, K, token 3, head 1, element 2
    place = (((1 * 2 + 0) * 16 + 3) * 2 + 1) * 4 + 2
    packed = codec_of(1).pack(unit, layout)
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
