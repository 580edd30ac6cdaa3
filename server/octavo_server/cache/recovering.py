"""After a restart: rows for the pages that the NVMe store still has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.page_table import NO_ROW, Rows
from octavo_server.store.nvme.records import Records

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache


def recover_pages(cache: PageCache, records: Records) -> None:
    """Makes rows for recovered units, oldest first, without reading a body.

    Pages of which a unit is missing are dropped: a page is written whole or not at all.
    """
    if not len(records):
        return
    page_of, first = _group_by_page(records)
    heads = records[first]
    units_seen = np.zeros(len(first), dtype=np.uint64)
    np.bitwise_or.at(units_seen, page_of, np.uint64(1) << records["unit"].astype(np.uint64))
    differs = np.zeros(len(first), dtype=np.bool_)
    for name in ("variant", "layout", "unit_count"):
        differs[page_of[records[name] != heads[name][page_of]]] = True
    whole = (units_seen == _full_masks(heads["unit_count"])) & ~differs
    for unit_count in np.unique(heads["unit_count"][whole]).tolist():
        chosen = np.flatnonzero(whole & (heads["unit_count"] == unit_count))
        _add_pages(cache, heads[chosen], records, page_of, chosen, unit_count)
    cache.counters.add("recovered_pages", int(whole.sum()))
    cache.counters.add("recovered_dropped_pages", int((~whole).sum()))
    _link_parents(cache, heads[whole])
    _touch(cache, records, page_of, first, whole)
    if not whole.all():
        assert cache.nvme is not None
        cache.nvme.forget_records(records[~whole[page_of]])


def _full_masks(unit_counts: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Masks with all units of each page, of which there are 1 to 64."""
    return ~np.uint64(0) >> (np.uint64(64) - unit_counts.astype(np.uint64))


def _group_by_page(records: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each record the number of its page; for each page the index of its first record."""
    order = np.lexsort((records["unit"], records["key"][:, 1], records["key"][:, 0]))
    order = order[np.argsort(records["namespace"][order], kind="stable")]
    keys, namespaces = records["key"][order], records["namespace"][order]
    starts = np.ones(len(records), dtype=np.bool_)
    starts[1:] = (keys[1:] != keys[:-1]).any(axis=1) | (namespaces[1:] != namespaces[:-1])
    page_of = np.empty(len(records), dtype=np.int64)
    page_of[order] = np.cumsum(starts) - 1
    return page_of, order[starts]


def _add_pages(
    cache: PageCache,
    heads: Records,
    records: Records,
    page_of: NDArray[np.int64],
    chosen: NDArray[np.int64],
    unit_count: int,
) -> None:
    table = cache.table
    rows = table.add(
        heads["key"],
        heads["namespace"].astype(np.int32),
        heads["layout"].astype(np.int32),
        unit_count,
        heads["position"].astype(np.uint32),
    )
    table.variant[rows] = heads["variant"]
    row_of_page = np.full(int(page_of.max()) + 1, NO_ROW, dtype=np.int32)
    row_of_page[chosen] = rows
    mine = np.flatnonzero(row_of_page[page_of] != NO_ROW)
    unit_rows = table.unit_base[row_of_page[page_of[mine]]] + records["unit"][mine]
    table.units.nvme_offset[unit_rows] = records["offset"][mine]
    table.units.length[unit_rows] = records["length"][mine]
    table.units.digest[unit_rows] = records["digest"][mine]
    table.set_nvme_mask(rows, table.full_mask[rows])


def _link_parents(cache: PageCache, heads: Records) -> None:
    table = cache.table
    rows = _rows_of(cache, heads)
    parents = table.index.find_columns(
        heads["parent"][:, 0], heads["parent"][:, 1], heads["namespace"].astype(np.int32)
    )
    has_parent = heads["parent"].any(axis=1) & (parents != NO_ROW)
    has_parent &= table.depth[rows] == table.depth[parents].astype(np.int64) + 1
    table.link(rows[has_parent], parents[has_parent])


def _touch(
    cache: PageCache,
    records: Records,
    page_of: NDArray[np.int64],
    first: NDArray[np.int64],
    whole: NDArray[np.bool_],
) -> None:
    """As if each page had last been used when it was written, and its ancestors with it."""
    table = cache.table
    newest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(newest, page_of, records["sequence"].astype(np.int64))
    rows = _rows_of(cache, records[first][whole])
    times = np.zeros(table.high_water, dtype=np.int64)
    times[rows] = newest[whole]
    by_depth = np.argsort(table.depth[rows], kind="stable")[::-1]
    ordered = rows[by_depth]
    depths = table.depth[ordered]
    bounds = np.flatnonzero(np.diff(depths.astype(np.int64), prepend=-1))
    for begin, end in zip(bounds, np.append(bounds[1:], len(ordered)), strict=True):
        level = ordered[begin:end]
        parents = table.parent[level]
        linked = parents != NO_ROW
        np.maximum.at(times, parents[linked], times[level[linked]])
    # Latest first; of equal times (a chain's pages) the head first.
    order = np.lexsort((table.depth[rows], -times[rows]))
    cache.policy.touch(rows[order])


def _rows_of(cache: PageCache, heads: Records) -> Rows:
    return cache.table.index.find_columns(
        heads["key"][:, 0], heads["key"][:, 1], heads["namespace"].astype(np.int32)
    )
