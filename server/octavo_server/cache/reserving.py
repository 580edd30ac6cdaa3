"""Reserve: which units of a chain are missing, and places for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache import removing
from octavo_server.cache.chains import ChainView, check_distinct
from octavo_server.cache.matching import is_present
from octavo_server.cache.page_table import NO_ROW, NOWHERE, Rows
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.retaining import NO_WISH, Retention, drop_expired, limit_offered
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import (
    ALREADY_PRESENT,
    NO_ROOM,
    PENDING,
    REJECTED,
    RESERVED,
    TOO_LARGE,
)
from octavo_server.store.slabs import sizes_of_slots

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache


@dataclass(frozen=True, slots=True)
class ReservePages:
    """Units that a session wants to put.

    ``positions``: the pages that it puts, ascending; the others of the chain are offered by
    somebody else and only keep it together. ``units``: unit indices, the same for each page.
    ``lengths``: bytes, shape [positions, units]. ``variants``: one a position. ``wish``: how long
    the pages at ``positions`` should stay.
    """

    chain: ChainView
    positions: NDArray[np.int64]
    units: NDArray[np.int32]
    lengths: NDArray[np.uint32]
    variants: NDArray[np.uint16]
    duration_s: float
    wish: Retention = NO_WISH


def reserve(
    cache: PageCache, session: Session, request: ReservePages
) -> tuple[Reservation | None, NDArray[np.uint8]]:
    """See ``PageCache.reserve``."""
    chain, table = request.chain, cache.table
    check_distinct(chain)
    cache.reservations.check_room(session)
    drop_expired(cache, chain)
    _drop_empty_rows_of_other_layouts(cache, chain)
    rows, parent_row, left = _complete_rows(cache, chain, table.find(chain.keys, chain.namespace))
    offered = rows[request.positions]
    _clear_unreadable(cache, session, request, offered)
    limit_offered(cache, chain, offered, request.wish)
    # Used before room is made for the new units, so that others go first.
    cache.policy.touch(rows)
    # Pinned, so that making room can't cut the chain. New rows included: without anything in
    # them they would be given back. What is durable may leave memory, or no chain could outgrow
    # the arena.
    pinned = np.concatenate([parent_row, rows])
    pinned = pinned[table.nvme_mask[pinned] != table.full_mask[pinned]]
    cache.pins.pin(pinned)
    try:
        statuses = _statuses(cache, session, request, offered)
        reserved_bytes = _place(cache, request, offered, statuses)
        reservation = None
        if reserved_bytes:
            bits = np.uint64(1) << request.units.astype(np.uint64)
            masks = np.where(statuses == RESERVED, bits[None, :], np.uint64(0))
            merged = np.zeros(len(chain), dtype=np.uint64)
            merged[request.positions] = np.bitwise_or.reduce(masks, axis=1)
            reserved_rows = np.where(merged != 0, rows, np.int32(NO_ROW)).astype(np.int32)
            reservation = cache.reservations.make(
                session, chain.layout, reserved_rows, merged, reserved_bytes, request.duration_s
            )
    finally:
        cache.pins.unpin(pinned)
        # Not before: empty rows of this very chain may be all that these stood below.
        table.drop_unused(left)
    counts = np.bincount(statuses.ravel(), minlength=16)
    cache.counters.add("put_units_reserved", int(counts[RESERVED]))
    cache.counters.add("put_units_present", int(counts[ALREADY_PRESENT]))
    cache.counters.add("put_units_refused", int(counts[[NO_ROOM, TOO_LARGE, REJECTED]].sum()))
    return reservation, statuses


def _drop_empty_rows_of_other_layouts(cache: PageCache, chain: ChainView) -> None:
    """A row has units as its layout says. One that is only there as somebody's parent, and under
    another layout, has to make way for a page of this layout.
    """
    table = cache.table
    rows = table.find(chain.keys, chain.namespace)
    rows = rows[(rows != NO_ROW) & (table.layout[rows] != chain.layout_number)]
    if not len(rows):
        return
    empty = rows[~table.is_begun(rows) & (table.pins[rows] == 0)]
    table.withdraw(empty)
    table.drop_unused(empty)


def _complete_rows(cache: PageCache, chain: ChainView, rows: Rows) -> tuple[Rows, Rows, Rows]:
    """Rows for all pages of the chain, linked to each other; the row before the first one; and
    withdrawn rows that were parents until now, and may go.
    """
    table = cache.table
    before = left = np.empty(0, dtype=np.int32)
    first_depth = 0
    if chain.parent is not None and not chain.unlinked:
        before = table.find(chain.parent, chain.namespace)
        if before[0] == NO_ROW:
            # Not here (any more). An empty row stands for it, so that the chain stays one.
            before = table.add(
                chain.parent,
                chain.namespace,
                chain.layout_number,
                chain.layout.layout.unit_count,
                np.zeros(1, np.uint32),
            )
        first_depth = int(table.depth[before[0]]) + 1
    missing = np.flatnonzero(rows == NO_ROW)
    depths = np.arange(first_depth, first_depth + len(chain), dtype=np.uint32)
    if chain.unlinked:
        depths[:] = 0
    if len(missing):
        rows = rows.copy()
        rows[missing] = table.add(
            chain.keys[missing],
            chain.namespace,
            chain.layout_number,
            chain.layout.layout.unit_count,
            depths[missing],
        )
    if not chain.unlinked:
        parents = np.concatenate([before if len(before) else [NO_ROW], rows[:-1]]).astype(np.int32)
        # A row gets its parent once, and only one that lies right above it: depth falls along
        # every link, so that no request, however strange, can make a chain a circle.
        left = _unlink_withdrawn_parents(cache, rows, parents)
        unlinked = (table.parent[rows] == NO_ROW) & (parents != NO_ROW)
        unlinked &= table.depth[rows] == table.depth[parents].astype(np.int64) + 1
        table.link(rows[unlinked], parents[unlinked])
    return rows, before, left


def _unlink_withdrawn_parents(cache: PageCache, rows: Rows, parents: Rows) -> Rows:
    """A parent that was deleted or quarantined while in use has left a row behind that no chain
    finds any more; the page that was put in its place is the parent now. Returns these rows.
    """
    table = cache.table
    linked = (table.parent[rows] != NO_ROW) & (parents != NO_ROW)
    return table.unlink(rows[linked & table.withdrawn[table.parent[rows]]])


def _clear_unreadable(
    cache: PageCache, session: Session, request: ReservePages, rows: Rows
) -> None:
    """Drops what this put is going to replace: complete pages in a variant that the session
    can't read, and incomplete ones that were begun in another variant. What somebody holds or
    writes stays.
    """
    table = cache.table
    here = table.memory_mask[rows] | table.nvme_mask[rows]
    complete = here == table.full_mask[rows]
    in_way = np.where(
        complete,
        ~session.can_read(table.variant[rows]),
        (here != 0) & (table.variant[rows] != request.variants),
    )
    in_way &= (table.pins[rows] == 0) & (table.reserved_mask[rows] == 0)
    in_way &= table.layout[rows] == request.chain.layout_number
    if in_way.any():
        removing.drop_content(cache, rows[in_way])


def _statuses(
    cache: PageCache, session: Session, request: ReservePages, rows: Rows
) -> NDArray[np.uint8]:
    """A status for each unit of each offered page, before places are sought: shape [pages,
    units]."""
    table = cache.table
    shape = (len(rows), len(request.units))
    bits = np.uint64(1) << request.units.astype(np.uint64)
    statuses = np.full(shape, RESERVED, dtype=np.uint8)
    statuses[request.lengths > cache.memory.unit_bytes_max] = TOO_LARGE
    here = table.memory_mask[rows] | table.nvme_mask[rows]
    begun = (here != 0) | (table.reserved_mask[rows] != 0)
    statuses[begun & (table.variant[rows] != request.variants)] = PENDING
    statuses[(table.reserved_mask[rows][:, None] & bits[None, :]) != 0] = PENDING
    statuses[(here[:, None] & bits[None, :]) != 0] = ALREADY_PRESENT
    complete = here == table.full_mask[rows]
    readable = is_present(cache, session, request.chain, rows)
    statuses[complete & readable] = ALREADY_PRESENT
    # Complete, not readable, and in use: it can't be replaced now.
    statuses[complete & ~readable] = REJECTED
    # The key of a page of another layout, which has other units. No honest client makes one.
    statuses[table.layout[rows] != request.chain.layout_number] = REJECTED
    return statuses


def _place(cache: PageCache, request: ReservePages, rows: Rows, statuses: NDArray[np.uint8]) -> int:
    """Finds places for what is RESERVED in ``statuses``, which it corrects where there are none.

    Returns the bytes of the places.
    """
    table = cache.table
    if not request.chain.unlinked:
        # Behind a page that can't be put whole, nothing would ever be found.
        refused = (statuses == TOO_LARGE) | (statuses == REJECTED)
        blocked = refused.any(axis=1)
        behind = np.cumsum(blocked) - blocked > 0
        statuses[behind[:, None] & (statuses == RESERVED)] = NO_ROOM
    pages, columns = np.nonzero(statuses == RESERVED)
    lengths = request.lengths[pages, columns]
    sizes = sizes_of_slots(lengths)
    affordable = int(np.searchsorted(np.cumsum(sizes), cache.reservations.bytes_left, side="right"))
    places = np.full(len(pages), NOWHERE, dtype=np.int64)
    places[:affordable] = cache.memory.place(lengths[:affordable])
    unplaced = places == NOWHERE
    if unplaced.any():
        lacking = np.zeros(len(rows), dtype=np.bool_)
        lacking[pages[unplaced]] = True
        if not request.chain.unlinked:
            lacking[int(np.argmax(lacking)) :] = True
        dropped = lacking[pages]
        cache.memory.arena.slots.free(places[dropped & ~unplaced])
        statuses[pages[dropped], columns[dropped]] = NO_ROOM
        kept = ~dropped
        pages, columns, lengths = pages[kept], columns[kept], lengths[kept]
        places, sizes = places[kept], sizes[kept]
    unit_rows = table.unit_base[rows[pages]] + request.units[columns]
    table.units.memory_offset[unit_rows] = places
    table.units.length[unit_rows] = lengths
    begun = np.unique(pages)
    table.variant[rows[begun]] = request.variants[begun]
    return int(sizes.sum())
