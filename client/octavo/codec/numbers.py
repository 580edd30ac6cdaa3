"""The one-byte scales and offsets of K channels, as numbers. docs/codecs.md specifies them."""

from __future__ import annotations

from typing import Final

SCALE_MANTISSAS: Final = (1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878)
"""1024 x 2^(i/8), rounded: eight steps an octave, of eleven bits each so that a scale times an
FP8 number, or times an 8-bit integer, is exact in float32."""

SCALE_CODES: Final = 255
"""Codes 0 to 254 are scales from 2^-21 to 2^10.75; code 255 says that the row is not finite."""

SCALES: Final = tuple(
    SCALE_MANTISSAS[code % 8] * 2.0 ** (code // 8 - 31) for code in range(SCALE_CODES)
)

NOT_FINITE: Final = 255

OFFSET_CODES: Final = 128
"""Magnitudes of an offset; bit 7 of its byte is the sign."""

OFFSETS: Final = tuple(
    code if code < 16 else (8 + code % 8) << (code // 8 - 1) for code in range(OFFSET_CODES)
)
"""0 to 15, then eight steps an octave up to 245,760."""

SHIFT_UNIT: Final = 8.0
"""FP8's offset byte is an e4m3 number of these: multiples of 2^-6 up to 3,584."""
