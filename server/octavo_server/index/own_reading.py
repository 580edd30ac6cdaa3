"""Reading one holder's entries in one shard, some buckets at a time."""

from __future__ import annotations

import numpy as np

from octavo_server.index.entries import ALL_UNITS
from octavo_server.index.prefix_index import OwnEntries


class OwnReading:
    """What was read so far. ``first`` is the next bucket to read.

    Buckets come and go meanwhile: a split moves fields to the end, where the reading has not
    been; a merge moves them to where it may have been, so it begins again.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.first = 0
        self._buckets = 1
        self._number = 0
        self._whole: list[bytes] = []
        self._partial: list[bytes] = []

    def take(self, many: int, buckets: int, number: int, whole: bytes, partial: bytes) -> bool:
        """What ``own.lua`` answers for ``many`` buckets from ``first``; whether that was all."""
        if buckets < self._buckets and self.first:
            self.first, self._whole, self._partial = 0, [], []
            self._buckets = buckets
            return False
        self._buckets, self._number = buckets, number
        self._whole.append(whole)
        self._partial.append(partial)
        self.first += many
        return self.first >= buckets

    def entries(self) -> OwnEntries:
        """All of it."""
        fields = np.frombuffer(b"".join(self._whole), dtype="<u8")
        rows = np.frombuffer(b"".join(self._partial), dtype=[("field", "<u8"), ("units", ">u8")])
        whole_units = np.full(len(fields), ALL_UNITS, dtype=np.uint64)
        return OwnEntries(
            self.shard,
            self._number,
            np.concatenate([fields, rows["field"]]),
            np.concatenate([whole_units, rows["units"].astype(np.uint64)]),
        )
