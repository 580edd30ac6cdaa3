"""What the index keeps of a page, and how it is written down.

A page key is cut into a **shard** (its first byte) and a **field** (its last eight bytes, which
are the key's high word); the seven bytes between are not kept. Two pages that agree in shard
and field share an entry: with 10^8 pages that happens to one pair in a million clusters, and
costs a miss, since whoever serves a page checks its whole key.

A field's value is what each holder has, one entry after the other:

    all units      0xxxxxxx x3          holder id, 4 bytes, big-endian, below 2^31
    some units     1xxxxxxx x3 mask     the same with its top bit set, then 8 bytes of unit mask
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
"""Page keys, shape [pages, 2]: low word, high word, as ``octavo_proto.columns.read_keys`` gives."""

Column = NDArray[np.uint64]

SHARD_COUNT: Final = 256
"""One a value of the key's first byte. A shard is what one script call may touch in any cluster,
so there must be more of them than servers, and few enough to keep a number for each."""

FIELD_BYTES: Final = 8
HOLDER_ID_BYTES: Final = 4
HOLDER_ID_MAX: Final = 2**31 - 1

ALL_UNITS: Final = 2**64 - 1
"""Every unit that the page's layout may have."""

VALUE_BYTES_MAX: Final = 64
"""Redis' ``hash-max-listpack-value``: one longer value makes its whole hash four times as large.
Sixteen holders of a whole page fit, and nobody needs the name of a seventeenth."""

_PARTIAL: Final = 1 << 31


@dataclass(frozen=True, slots=True, order=True)
class Holding:
    """What one holder has of a page. ``units`` is a mask; ``ALL_UNITS`` for a whole page."""

    holder_id: int
    units: int = ALL_UNITS


def shards_of(keys: Keys) -> NDArray[np.uint8]:
    """The shard of each key."""
    return (keys[:, 0] & np.uint64(0xFF)).astype(np.uint8)


def keys_from_fields(shard: int, fields: Column) -> Keys:
    """Keys that the index cannot tell from those that the fields came from."""
    keys = np.empty((len(fields), 2), dtype=np.uint64)
    keys[:, 0] = shard
    keys[:, 1] = fields
    return keys


def encode_holder_id(holder_id: int) -> bytes:
    """Four bytes, the entry of a holder that has all units."""
    assert 0 < holder_id <= HOLDER_ID_MAX, holder_id
    return struct.pack(">I", holder_id)


def encode_holdings(holdings: tuple[Holding, ...]) -> bytes:
    """A field's value."""
    return b"".join(
        encode_holder_id(each.holder_id)
        if each.units == ALL_UNITS
        else struct.pack(">IQ", each.holder_id | _PARTIAL, each.units)
        for each in holdings
    )


def decode_holdings(value: bytes) -> tuple[Holding, ...]:
    """What a field's value says, ordered by holder.

    What cannot be read (somebody else's bytes) ends the list: the index is a hint.
    """
    found: list[Holding] = []
    at = 0
    while at + HOLDER_ID_BYTES <= len(value):
        (word,) = struct.unpack_from(">I", value, at)
        at += HOLDER_ID_BYTES
        if word < _PARTIAL:
            found.append(Holding(word))
            continue
        if at + 8 > len(value):
            break
        (units,) = struct.unpack_from(">Q", value, at)
        at += 8
        found.append(Holding(word ^ _PARTIAL, units))
    return tuple(sorted(found))
