"""The bytes are those of the document: an independent reader finds the same numbers in them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.kv import bits, gqa, mla, torch_dtype, unit_tensors, units
from tests.codec.reader import read_keys_and_values, read_latents

from octavo import Layout
from octavo.codec import codec_by_name, codec_names, codec_of
from octavo.codec.bits import pack_bits, unpack_bits
from octavo.codec.scratch import Scratch

NAMES = codec_names()[1:]
FUZZ = settings(max_examples=12, deadline=None, derandomize=True)


def as_read(values: list[float], layout: Layout) -> torch.Tensor:
    """Rounded to the layout's dtype, saturating at its largest number."""
    numbers = torch.tensor(values, dtype=torch.float32)
    largest = torch.finfo(torch_dtype(layout)).max
    return numbers.clamp(-largest, largest).to(torch_dtype(layout))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for which NaN and which zero it is."""
    nan = one.isnan() & other.isnan()
    return bool((nan | (one == other)).all())


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_an_independent_reader_finds_the_same_keys_and_values(
    name: str, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    layout = gqa(dtype, layers=2, page_tokens=32, kv_heads=2, head_dim=3)
    codec = codec_by_name(name)
    packed = codec.pack(data.draw(unit_tensors(layout))[:1], layout)
    got = codec.unpack(packed, layout, 0)
    read = read_keys_and_values(packed[0].numpy().tobytes(), name, 2, 32, 2, 3)
    assert same(got.flatten(), as_read(read, layout))


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_an_independent_reader_finds_the_same_latents(name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    layout = mla(dtype, layers=1, head_dim=130, rope_dim=2)
    codec = codec_by_name(name)
    packed = codec.pack(data.draw(unit_tensors(layout))[:1], layout)
    got = codec.unpack(packed, layout, 0)[0].view(-1, 132)
    read = read_latents(packed[0].numpy().tobytes(), name, 1, 16, 130, 2)
    rows = [read[begin : begin + 132] for begin in range(0, len(read), 132)]
    latents = [value for row in rows for value in row[:130] if isinstance(value, float)]
    assert same(got[:, :130].flatten(), as_read(latents, layout))
    rope = b"".join(value for row in rows for value in row[130:] if isinstance(value, bytes))
    if dtype != "float32":
        assert rope == bits(got[:, 130:]).numpy().tobytes()
        return
    stored = torch.frombuffer(bytearray(rope), dtype=torch.int16).view(16, 2)
    nan = got[:, 130:].isnan()
    assert torch.equal(stored == 0x7FC0, nan)
    assert torch.equal(stored[~nan], bits(got[:, 130:].to(torch.bfloat16))[~nan])


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("tokens", [16, 64])
def test_every_nan_of_float32_rope_is_one_nan(name: str, tokens: int) -> None:
    layout = mla("float32", layers=3, head_dim=130, rope_dim=2)
    units = torch.zeros((tokens // 16, 3, 16, 132))
    units[..., 130] = torch.nan
    units[..., 131] = -torch.nan
    codec = codec_by_name(name)
    packed = codec.pack(units, layout)
    again = codec.pack(codec.unpack(packed, layout, 0), layout)
    assert torch.equal(packed, again)
    for page in packed:
        read = read_latents(page.numpy().tobytes(), name, 3, 16, 130, 2)
        rope = b"".join(value for value in read if isinstance(value, bytes))
        assert rope == b"\xc0\x7f" * (3 * 16 * 2)


@pytest.mark.parametrize("count", [8, 6, 5])
def test_bits_are_packed_without_loss(count: int) -> None:
    codes = torch.randint(0, 2**count, (3, 16, 7), dtype=torch.uint8)
    packed = pack_bits(codes.clone(), count)
    assert packed.shape == (3, 2 * count, 7)
    assert torch.equal(unpack_bits(packed, count, Scratch(codes.device)), codes)


@pytest.mark.parametrize(
    ("name", "unit_bytes"),
    [("fp8_e5m2", 4384), ("fp8_e4m3", 4384), ("int8", 4416), ("int6", 3392), ("int5", 2880)],
)
def test_bytes_of_a_page_at_head_dim_128(name: str, unit_bytes: int) -> None:
    """(bits + 0.625) / 16 of bfloat16 for integers, (8 + 0.5625) / 16 for FP8."""
    layout = gqa(layers=1, kv_heads=1, head_dim=128)
    assert layout.raw_unit_bytes(0) == 8192
    assert codec_by_name(name).unit_bytes(layout, 0) == unit_bytes


def test_deepseek_v3_has_656_bytes_a_token_and_layer_in_8_bits() -> None:
    layout = mla(layers=61, head_dim=512, rope_dim=64)
    for name in ("fp8_e5m2", "fp8_e4m3", "int8"):
        assert codec_by_name(name).unit_bytes(layout, 0) == 61 * 16 * 656


def test_mla_scales_are_float32_on_tiles_of_128_behind_the_codes() -> None:
    layout = mla(layers=1, head_dim=512, rope_dim=64)
    values = units(layout, 1)
    packed = codec_by_name("fp8_e4m3").pack(values, layout)
    scales = packed[:, 16 * 512 : 16 * 528].contiguous().view(torch.float32).view(16, 4)
    largest = values[0, 0, :, :512].float().reshape(16, 4, 128).abs().amax(-1)
    assert torch.equal(scales, largest / 448)
    assert packed[0, 16 * 528 :].numpy().tobytes() == bits(values[0, 0, :, 512:]).numpy().tobytes()


@pytest.mark.parametrize("variant", [2, 3, 4, 5, 6, 34, 35, 36, 37, 38])
def test_bytes_are_what_they_were(variant: int) -> None:
    """Pages on disk outlive this version: a variant's bytes never change. Values are integers
    over powers of two, so that every platform makes the same ones."""
    layouts = (gqa(page_tokens=32, head_dim=16), mla(page_tokens=32))
    digest = hashlib.sha256()
    for layout in layouts:
        count = 2 * layout.raw_unit_bytes(0) // 2
        numbers = (torch.arange(count) * 7919 % 509 - 254) * (torch.arange(count) % 13 + 1)
        values = (numbers / 256).to(torch.bfloat16)
        shape = units(layout, 2).shape
        digest.update(codec_of(variant).pack(values.view(shape), layout).numpy().tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[variant]


DIGESTS = {
    2: "48a0091b401ead56",
    3: "a0e4d044aeb80f4b",
    4: "0a6851f0822b2669",
    5: "a34e192ed5b6682d",
    6: "e4de56414a9198b0",
    34: "9e2dfcfd671606cd",
    35: "512ce1a0dc30571f",
    36: "00094f416ae801ff",
    37: "ef5207dec975d8a8",
    38: "d39c113324794f09",
}
