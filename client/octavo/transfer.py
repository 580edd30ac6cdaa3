"""Which units a get or put moves, and where their bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.codec import Profile
from octavo.errors import InvalidRequest
from octavo_proto.layout import Layout
from octavo_proto.limits import UNITS_MAX

SLICE_BYTES_MAX: Final = 64 << 20
"""Bytes handed to a sink or source at a time: about 6 ms of copying, after which leases are
renewed and a mapping that is to go can go."""

NOT_WANTED: Final = 255

EXACT: Final = Profile.named("exact")


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """``page_count`` pages of a chain and the wanted units of each: the pages from
    ``first_page`` on, or ``chosen`` ones of those.

    Its rows are (page, wanted unit) in that order: row = place of the page among ``positions``
    * len(units) + rank of the unit among ``units``, which ascend.
    """

    layout: Layout
    first_page: int
    page_count: int
    units: tuple[int, ...]
    chosen: NDArray[np.int64] | None = None
    """Their positions in the chain, ascending; None means that none is left out."""
    profile: Profile = EXACT
    """The namespace's: how a source that packs is to pack, unless it was told otherwise."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """The pages by their positions in the chain, ascending."""
        if self.chosen is not None:
            return self.chosen
        return np.arange(self.first_page, self.first_page + self.page_count, dtype=np.int64)

    @property
    def page_end(self) -> int:
        """The position behind the last page."""
        if self.chosen is None or not len(self.chosen):
            return self.first_page + self.page_count
        return int(self.chosen[-1]) + 1

    @property
    def row_count(self) -> int:
        return self.page_count * len(self.units)

    @property
    def unit_mask(self) -> int:
        return sum(1 << unit for unit in self.units)

    def unit_ranks(self) -> NDArray[np.uint8]:
        """By unit index (256 of them): its rank among the wanted, or ``NOT_WANTED``."""
        ranks = np.full(256, NOT_WANTED, dtype=np.uint8)
        ranks[list(self.units)] = np.arange(len(self.units), dtype=np.uint8)
        return ranks

    def positions_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        places = rows // len(self.units)
        return places + self.first_page if self.chosen is None else self.chosen[places]

    def places_of(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Places of pages among ``positions``, and which of them are there; the others' places
        mean nothing."""
        if self.chosen is None:
            places = positions - self.first_page
            return places, (places >= 0) & (places < self.page_count)
        places = np.searchsorted(self.chosen, positions)
        places[places == len(self.chosen)] = 0
        return places, self.chosen[places] == positions

    def units_of(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.asarray(self.units, dtype=np.uint8)[rows % len(self.units)]


@dataclass(frozen=True, slots=True)
class Rows:
    """Units and their memory in this process, one row a unit; columns of equal length.

    ``rows`` are row numbers of the transfer, ``addresses`` where ``lengths`` bytes lie (get) or
    must be written (put). The addresses are valid during the call that was handed them.
    """

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    units: NDArray[np.uint8]
    variants: NDArray[np.uint16]
    lengths: NDArray[np.int64]
    addresses: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size_bytes(self) -> int:
        return int(self.lengths.sum())

    def take(self, begin: int, end: int) -> Rows:
        return Rows(
            self.rows[begin:end],
            self.positions[begin:end],
            self.units[begin:end],
            self.variants[begin:end],
            self.lengths[begin:end],
            self.addresses[begin:end],
        )

    def chosen(self, chosen: NDArray[np.bool_]) -> Rows:
        """Those rows whose element of ``chosen`` is set."""
        return Rows(
            self.rows[chosen],
            self.positions[chosen],
            self.units[chosen],
            self.variants[chosen],
            self.lengths[chosen],
            self.addresses[chosen],
        )

    def slices(self, size_bytes_max: int = SLICE_BYTES_MAX) -> Iterator[Rows]:
        """The rows in order, in pieces of at most ``size_bytes_max`` or of one row."""
        for begin, end in cut(self.lengths, size_bytes_max, len(self)):
            yield self.take(begin, end)


@runtime_checkable
class RowSink(Protocol):
    """Takes many units at once. Used in preference to ``accept`` where a sink has it."""

    def begin(self, transfer: Transfer) -> None:
        """Called before the first rows, and again if the whole get is tried again."""
        ...

    def accept_rows(self, rows: Rows) -> None:
        """Copies what the rows' addresses hold. Must not keep the addresses."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """Fills many units at once. Used in preference to ``fill`` where a source has it."""

    def begin(self, transfer: Transfer) -> None:
        """Called before anything else, and again if the whole put is tried again."""
        ...

    def unit_lengths(self) -> NDArray[np.uint32]:
        """Bytes of a unit: one for all, one a page, or one a row of the transfer."""
        ...

    def page_variants(self) -> NDArray[np.uint16]:
        """Variant: one for all, or one a page of the transfer."""
        ...

    def fill_rows(self, rows: Rows) -> None:
        """Writes each row's bytes at its address. Must not keep the addresses."""
        ...


@runtime_checkable
class PlacingSink(RowSink, Protocol):
    """A row sink into whose memory a transport may receive, instead of lending it the bytes."""

    def places_of(self, rows: Rows) -> NDArray[np.int64]:
        """Where the bytes of rows belong. They are written there, by other threads and in any
        order, until the get ends; of rows whose page is not ``DONE`` anything may lie there."""
        ...

    def placed(self, rows: Rows) -> None:
        """The bytes of these rows lie at their places, whole."""
        ...


@runtime_checkable
class PlacingSource(RowSource, Protocol):
    """A row source from whose memory a transport may send, instead of having it copied."""

    def places_of(self, rows: Rows) -> NDArray[np.int64]:
        """Where the bytes of rows lie; they are read there until the put ends."""
        ...


def cut(
    lengths: NDArray[np.int64], size_bytes_max: int, rows_max: int
) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows, in order, each within both bounds or of a single row."""
    ends = np.cumsum(lengths)
    begin, row_count = 0, len(lengths)
    while begin < row_count:
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + size_bytes_max, side="right"))
        end = min(max(end, begin + 1), begin + rows_max, row_count)
        yield begin, end
        begin = end


def wanted_units(units: int | Iterable[int] | None, layout: Layout) -> tuple[int, ...]:
    """Unit indices, ascending, from a mask (int), a set of indices, or None for all.

    Raises:
        InvalidRequest: a unit that the layout does not have, or none at all.
    """
    if units is None:
        return tuple(range(layout.unit_count))
    if isinstance(units, int):
        if units < 0 or units >> UNITS_MAX:
            raise InvalidRequest(f"unit mask {units} is not a mask of {UNITS_MAX} bits")
        chosen = [unit for unit in range(UNITS_MAX) if units >> unit & 1]
    else:
        chosen = sorted(set(units))
    if not chosen or chosen[0] < 0 or chosen[-1] >= layout.unit_count:
        raise InvalidRequest(
            f"units {chosen} wanted, layout {layout.name!r} has units 0 to {layout.unit_count - 1}"
        )
    return tuple(chosen)


def page_window(chain_pages: int, first_page: int, page_count: int | None) -> tuple[int, int]:
    """Checked (first page, page count) of a part of a chain; None means up to its end.

    Raises:
        InvalidRequest: the part reaches outside of the chain.
    """
    count = chain_pages - first_page if page_count is None else page_count
    if first_page < 0 or count < 0 or first_page + count > chain_pages:
        raise InvalidRequest(
            f"pages {first_page} to {first_page + count} wanted, the chain has {chain_pages}"
        )
    return first_page, count


def wanted_transfer(
    layout: Layout,
    window: tuple[int, int],
    units: int | Iterable[int] | None,
    positions: ArrayLike | None = None,
    profile: Profile = EXACT,
) -> Transfer:
    """What a call moves of the pages in ``window``: first page, page count.

    Raises:
        InvalidRequest: units that the layout does not have, or positions outside of the window.
    """
    first_page, page_count = window
    chosen = None if positions is None else _chosen(positions, first_page, page_count)
    return Transfer(
        layout,
        first_page,
        page_count if chosen is None else len(chosen),
        wanted_units(units, layout),
        chosen,
        profile,
    )


def _chosen(positions: ArrayLike, first_page: int, page_count: int) -> NDArray[np.int64]:
    given = np.asarray(positions)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise InvalidRequest("positions must be whole numbers in one dimension")
    chosen = given.astype(np.int64)
    if (np.diff(chosen) <= 0).any():
        raise InvalidRequest("positions must ascend, each once")
    page_end = first_page + page_count
    if len(chosen) and (chosen[0] < first_page or chosen[-1] >= page_end):
        raise InvalidRequest(
            f"positions {chosen[0]} to {chosen[-1]} wanted, the call is about pages "
            f"{first_page} to {page_end - 1}"
        )
    return chosen
