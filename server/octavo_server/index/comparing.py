"""What must change in the index for a holder's entries to be true."""

from __future__ import annotations

import numpy as np

from octavo_server.index.changes import Changes, joined
from octavo_server.index.entries import keys_from_fields
from octavo_server.index.prefix_index import OwnEntries


def difference(found: OwnEntries, held: Changes) -> Changes:
    """Withdrawals of what the holder has not, then what the index lacks or has otherwise.

    Two keys of ``held`` that the index cannot tell apart are one to it: either serves.
    """
    fields, first = np.unique(held.keys[:, 1], return_index=True)
    units = held.units[first]
    places = np.searchsorted(fields, found.fields)
    inside = places < len(fields)
    is_held = np.zeros(len(found.fields), dtype=np.bool_)
    is_held[inside] = fields[places[inside]] == found.fields[inside]
    is_right = np.zeros(len(fields), dtype=np.bool_)
    rows = places[is_held]
    is_right[rows] = units[rows] == found.units[is_held]
    return joined(
        [
            Changes.withdrawn(keys_from_fields(found.shard, found.fields[~is_held])),
            Changes(held.keys[first], units).where(~is_right),
        ]
    )
