"""Reads packed units one number at a time, from docs/codecs.md alone: no torch, nothing of ours.

Slow and plain on purpose; it shows that the document is enough.
"""

from __future__ import annotations

import math
import struct

F32 = struct.Struct("<f")
MANTISSAS = (1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878)


def single(value: float) -> float:
    """Rounded to float32."""
    if math.isnan(value) or math.isinf(value):
        return value
    try:
        return float(F32.unpack(F32.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e5m2_of_448(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 2 & 31, code & 3
    if exponent == 0:
        return sign * mantissa * 2.0 ** (-16 - 7)
    return sign * (4 + mantissa) * 2.0 ** (exponent - 17 - 7)


def half(data: bytes) -> float:
    return float(struct.unpack("<e", data)[0])


def channel_scale(code: int) -> float:
    return math.nan if code == 255 else MANTISSAS[code % 8] * 2.0 ** (code // 8 - 31)


def integer_scale(code: int) -> float:
    if code == 255:
        return math.nan
    if code < 16:
        steps = 12 * code - 480
    elif code < 208:
        steps = code - 304
    else:
        steps = 6 * code - 1344
    return round(1024 * 2 ** (steps % 24 / 24)) * 2.0 ** (steps // 24 - 10)


def integer_offset(byte: int) -> int:
    code = byte & 127
    if code < 64:
        magnitude = code
    elif code < 80:
        magnitude = 4 * code - 192
    else:
        magnitude = (8 + code % 8) << (code // 8 - 6)
    return -magnitude if byte & 128 else magnitude


def code_at(group: bytes, bits: int, width: int, token: int, column: int) -> int:
    """Of a group of 16 tokens in rows of ``width`` bytes."""
    if bits == 8:
        return group[token * width + column]
    low = group[(token % 8) * width + column] >> (4 * (token // 8)) & 15
    extra = bits - 4
    rows = 2 * extra
    high = group[(8 + token % rows) * width + column] >> (extra * (token // rows))
    return low | (high & (1 << extra) - 1) << 4


class Reader:
    """Goes through a packed unit's bytes from the first to the last."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def take(self, size_bytes: int) -> bytes:
        part = self.data[self.place : self.place + size_bytes]
        assert len(part) == size_bytes
        self.place += size_bytes
        return part


def read_keys_and_values(
    data: bytes, name: str, layers: int, tokens: int, heads: int, dim: int
) -> list[float]:
    """float32 numbers of a unit in canonical order, before they are rounded to the dtype."""
    bits = {"int6": 6, "int5": 5}.get(name, 8)
    is_integer = name.startswith("int")
    groups, width = tokens // 16, heads * dim
    reader = Reader(data)
    group_bytes = 2 * bits * width
    codes = [reader.take(group_bytes) for _ in range(layers * 2 * groups)]
    k_scale = reader.take(layers * groups * width)
    k_offset = reader.take(layers * groups * width)
    v_scale = reader.take(layers * tokens * heads * 2)
    v_zero = reader.take(layers * tokens * heads * 2) if is_integer else b""
    assert reader.place == len(data)
    number = e4m3 if name == "fp8_e4m3" else e5m2_of_448
    values: list[float] = []
    for layer in range(layers):
        for side in (0, 1):
            for token in range(tokens):
                for column in range(width):
                    group = (layer * 2 + side) * groups + token // 16
                    code = code_at(codes[group], bits, width, token % 16, column)
                    if side == 0:
                        row = (layer * groups + token // 16) * width + column
                        offset = k_offset[row]
                        if is_integer:
                            scale = integer_scale(k_scale[row])
                            shift = 8 * scale * (integer_offset(offset) - 64)
                            values.append(single(code * scale * 2.0 ** (10 - bits) + shift))
                        else:
                            scale = channel_scale(k_scale[row])
                            values.append(single(number(code) * scale + 8 * e4m3(offset)))
                        continue
                    row = ((layer * tokens + token) * heads + column // dim) * 2
                    scale = half(v_scale[row : row + 2])
                    if is_integer:
                        values.append(single(code * scale + half(v_zero[row : row + 2])))
                    else:
                        values.append(single(number(code) * scale))
    return values


def read_latents(
    data: bytes, name: str, layers: int, tokens: int, latent: int, rope: int
) -> list[float | bytes]:
    """Likewise for MLA; rotary elements as their two bytes."""
    bits = {"int6": 6, "int5": 5}.get(name, 8)
    is_integer = name.startswith("int")
    groups, tiles = tokens // 16, -(-latent // 128)
    reader = Reader(data)
    codes = [reader.take(2 * bits * latent) for _ in range(layers * groups)]
    scale_bytes = 2 if is_integer else 4
    scales = reader.take(layers * tokens * tiles * scale_bytes)
    zeros = reader.take(layers * tokens * tiles * 2) if is_integer else b""
    ropes = reader.take(layers * tokens * rope * 2)
    assert reader.place == len(data)
    number = e4m3 if name == "fp8_e4m3" else e5m2_of_448
    values: list[float | bytes] = []
    for layer in range(layers):
        for token in range(tokens):
            for column in range(latent):
                code = code_at(
                    codes[layer * groups + token // 16], bits, latent, token % 16, column
                )
                row = (layer * tokens + token) * tiles + column // 128
                if is_integer:
                    scale = half(scales[2 * row : 2 * row + 2])
                    values.append(single(code * scale + half(zeros[2 * row : 2 * row + 2])))
                else:
                    scale = float(F32.unpack(scales[4 * row : 4 * row + 4])[0])
                    values.append(single(number(code) * scale))
            begin = (layer * tokens + token) * rope * 2
            values.extend(ropes[begin + 2 * i : begin + 2 * i + 2] for i in range(rope))
    return values
