"""What sources that pack have in common: which codec a page gets, and when it is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.codec import Codec, Profile
from octavo.errors import InvalidRequest, TransferError
from octavo.paged.units import UnitMemory, by_unit
from octavo.transfer import EXACT, Rows, Transfer
from octavo_proto.layout import Layout

UNPACKED_BYTES_MAX: Final = 16 << 20
"""Unpacked values held at a time. New memory for all of a slice would cost as much time as
packing or unpacking it."""


class PackingSource(ABC):
    """A ``RowSource`` of unit tensors. A subclass says where these come from.

    Pages are packed by the profile that the source was made with; without one, by that of the
    transfer, which is the client's for the chain's namespace.
    """

    def __init__(self, layout: Layout, profile: Profile | str | None) -> None:
        self._layout: Final = layout
        self._own: Final = Profile.named(profile) if isinstance(profile, str) else profile
        self._profile = self._own or EXACT
        self._transfer: Transfer | None = None

    @abstractmethod
    def gather(self, unit: int, positions: NDArray[np.int64]) -> Tensor:
        """The unit tensor (see ``Codec``) of some pages, in bits."""

    def begin(self, transfer: Transfer) -> None:
        """Raises InvalidRequest: the chain is of another layout."""
        if transfer.layout != self._layout:
            raise InvalidRequest(
                f"the chain's layout {transfer.layout.name!r} is not the source's, "
                f"{self._layout.name!r}"
            )
        self._transfer = transfer
        self._profile = self._own or transfer.profile

    def unit_lengths(self) -> NDArray[np.uint32]:
        transfer, layout = self._begun(), self._layout
        by_row = np.array(
            [
                [self._codec_at(position).unit_bytes(layout, unit) for unit in transfer.units]
                for position in self._kinds(transfer)
            ],
            dtype=np.uint32,
        )
        if (by_row == by_row.flat[0]).all():
            return by_row.reshape(-1)[:1]
        counts = np.ones(len(by_row), dtype=np.int64)
        counts[-1] = transfer.page_count - len(by_row) + 1
        return by_row.repeat(counts, axis=0).reshape(-1)

    def page_variants(self) -> NDArray[np.uint16]:
        transfer = self._begun()
        kinds = [self._codec_at(position).variant for position in self._kinds(transfer)]
        if len(set(kinds)) == 1:
            return np.array(kinds[:1], dtype=np.uint16)
        by_page = np.full(transfer.page_count, kinds[-1], dtype=np.uint16)
        by_page[0] = kinds[0]
        return by_page

    def fill_rows(self, rows: Rows) -> None:
        for unit, of_unit in by_unit(rows):
            is_first = rows.positions[of_unit] == 0
            for alike in (of_unit[is_first], of_unit[~is_first]):
                step = max(1, UNPACKED_BYTES_MAX // self._layout.raw_unit_bytes(unit))
                for begin in range(0, len(alike), step):
                    self._fill(rows, unit, alike[begin : begin + step])

    def _fill(self, rows: Rows, unit: int, chosen: NDArray[np.intp]) -> None:
        """Packs pages that share a codec."""
        codec = self._codec_at(int(rows.positions[chosen[0]]))
        packed = codec.pack(self.gather(unit, rows.positions[chosen]), self._layout)
        if packed.shape[1] != int(rows.lengths[chosen][0]):
            raise TransferError(f"codec {codec.name} made {packed.shape[1]} bytes")
        memory = UnitMemory(rows.addresses[chosen], packed.shape[1], writable=True)
        memory.write(packed)

    def _codec_at(self, position: int) -> Codec:
        return self._profile.codec_at(self._layout, position)

    def _kinds(self, transfer: Transfer) -> list[int]:
        """Pages that stand for all: a chain's first page may be packed otherwise, the others
        are alike."""
        return [int(position) for position in transfer.positions[:2]]

    def _begun(self) -> Transfer:
        assert self._transfer is not None
        return self._transfer
