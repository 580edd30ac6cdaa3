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

SHIFT_UNIT: Final = 8.0
"""FP8's offset byte is an e4m3 number of these: multiples of 2^-6 up to 3,584."""

INTEGER_MANTISSAS: Final = (
    *(1024, 1054, 1085, 1117, 1149, 1183, 1218, 1253),
    *(1290, 1328, 1367, 1407, 1448, 1491, 1534, 1579),
    *(1625, 1673, 1722, 1773, 1825, 1878, 1933, 1990),
)
"""1024 x 2^(i/24), rounded."""

FINE_FROM: Final = 16
"""Codes of integer scales below this one are two to the octave, from 2^-20 to 2^-12."""

COARSE_FROM: Final = 208
"""Codes from here on are four to the octave, from 2^-4 on; those between, 24. A row of integers
spans 1,024 scales at most, so fine ones are for rows that span 1/4 to 64, as keys do."""


def _integer_scale(code: int) -> float:
    if code < FINE_FROM:
        steps = 12 * code - 20 * 24
    elif code < COARSE_FROM:
        steps = code - FINE_FROM - 12 * 24
    else:
        steps = 6 * (code - COARSE_FROM) - 4 * 24
    return INTEGER_MANTISSAS[steps % 24] * 2.0 ** (steps // 24 - 10)


INTEGER_SCALES: Final = tuple(_integer_scale(code) for code in range(SCALE_CODES))
"""From 2^-20 to 2^7.5, eleven bits each."""

OFFSET_LINEAR: Final = 64
"""Magnitudes of an offset up to here are their own codes."""

OFFSET_OCTAVE: Final = 80
"""From this code on, which is 128, there are eight steps an octave; between them, sixteen."""

OFFSET_CODES: Final = 128
"""Magnitudes of an offset; bit 7 of its byte is the sign."""


def _offset(code: int) -> int:
    if code < OFFSET_LINEAR:
        return code
    if code < OFFSET_OCTAVE:
        return 64 + 4 * (code - OFFSET_LINEAR)
    octave, step = divmod(code - OFFSET_OCTAVE, 8)
    return (8 + step) << (octave + 4)


OFFSETS: Final = tuple(_offset(code) for code in range(OFFSET_CODES))
"""In 1/128 of what a row can span: 0 to 63, to 124 by four, then to 7,680."""
