"""After a restart: rows for the pages that the NVMe store still has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.lifetimes import stored_moments
from octavo_server.cache.page_table import NEVER, NO_ROW, Rows
from octavo_server.store.nvme.records import Records

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache


def recover_pages(cache: PageCache, records: Records) -> None:
    """Makes rows for recovered units, oldest first, without reading a body.

    Pages of which a unit is missing are dropped: a page is written whole or not at all. So are
    those that have expired meanwhile.
    """
    if not len(records):
        return
    page_of, first = _group_by_page(records)
    heads = records[first]
    whole = _whole_pages(records, page_of, heads)
    cache.counters.add("recovered_dropped_pages", int((~whole).sum()))
    expires_ms = _moments(records, page_of, len(heads))
    expired = whole & (expires_ms <= cache.lifetimes.now_ms())
    cache.counters.add("expired_pages", int(expired.sum()))
    whole &= ~expired
    row_of_page = np.full(len(first), NO_ROW, dtype=np.int32)
    for unit_count in np.unique(heads["unit_count"][whole]).tolist():
        chosen = np.flatnonzero(whole & (heads["unit_count"] == unit_count))
        row_of_page[chosen] = _add_pages(cache, heads[chosen], unit_count)
    _add_units(cache, records, row_of_page[page_of])
    cache.counters.add("recovered_pages", int(whole.sum()))
    rows = row_of_page[whole]
    cache.lifetimes.recovered(rows, expires_ms[whole])
    _link_parents(cache, heads[whole], rows)
    newest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(newest, page_of, records["sequence"].astype(np.int64))
    _touch(cache, rows, newest[whole])
    if not whole.all():
        assert cache.nvme is not None
        cache.nvme.forget_records(records[~whole[page_of]])


def _whole_pages(records: Records, page_of: NDArray[np.int64], heads: Records) -> NDArray[np.bool_]:
    """For each page whether all its units are there and agree on what they are part of."""
    units_seen = np.zeros(len(heads), dtype=np.uint64)
    np.bitwise_or.at(units_seen, page_of, np.uint64(1) << records["unit"].astype(np.uint64))
    whole: NDArray[np.bool_] = units_seen == _full_masks(heads["unit_count"])
    for name in ("variant", "layout", "unit_count"):
        whole[page_of[records[name] != heads[name][page_of]]] = False
    return whole


def _moments(records: Records, page_of: NDArray[np.int64], page_count: int) -> NDArray[np.int64]:
    """When each page expires. Should its units disagree, the longest wish holds."""
    if not records["expires_ms"].any():
        return np.full(page_count, NEVER)
    latest = np.zeros(page_count, dtype=np.int64)
    np.maximum.at(latest, page_of, stored_moments(records["expires_ms"]))
    return latest


def _full_masks(unit_counts: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Masks with all units of each page, of which there are 1 to 64."""
    return ~np.uint64(0) >> (np.uint64(64) - unit_counts.astype(np.uint64))


def _group_by_page(records: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each record the number of its page; for each page the index of its first record."""
    if (records["unit_count"] == 1).all():  # no two records are of one page
        return np.arange(len(records)), np.arange(len(records))
    order = np.lexsort((records["unit"], records["key"][:, 1], records["key"][:, 0]))
    order = order[np.argsort(records["namespace"][order], kind="stable")]
    keys, namespaces = records["key"][order], records["namespace"][order]
    starts = np.ones(len(records), dtype=np.bool_)
    starts[1:] = (keys[1:] != keys[:-1]).any(axis=1) | (namespaces[1:] != namespaces[:-1])
    page_of = np.empty(len(records), dtype=np.int64)
    page_of[order] = np.cumsum(starts) - 1
    return page_of, order[starts]


def _add_pages(cache: PageCache, heads: Records, unit_count: int) -> Rows:
    table = cache.table
    rows = table.add(
        heads["key"],
        heads["namespace"].astype(np.int32),
        heads["layout"].astype(np.int32),
        unit_count,
        heads["position"].astype(np.uint32),
    )
    table.variant[rows] = heads["variant"]
    table.set_nvme_mask(rows, table.full_mask[rows])
    return rows


def _add_units(cache: PageCache, records: Records, rows: Rows) -> None:
    """What is known of units, given the row of each one's page."""
    table = cache.table
    mine = rows != NO_ROW
    unit_rows = table.unit_base[rows[mine]] + records["unit"][mine]
    table.units.nvme_offset[unit_rows] = records["offset"][mine]
    table.units.length[unit_rows] = records["length"][mine]
    table.units.digest[unit_rows] = records["digest"][mine]


def _link_parents(cache: PageCache, heads: Records, rows: Rows) -> None:
    table = cache.table
    low, high = heads["parent"][:, 0], heads["parent"][:, 1]
    children = np.flatnonzero((low != 0) | (high != 0))
    parents = table.index.find_columns(
        low[children], high[children], heads["namespace"][children].astype(np.int32)
    )
    rows = rows[children]
    sound = (parents != NO_ROW) & (table.depth[rows] == table.depth[parents].astype(np.int64) + 1)
    table.link(rows[sound], parents[sound])


def _touch(cache: PageCache, rows: Rows, written: NDArray[np.int64]) -> None:
    """As if each page had last been used when it was written, and its ancestors with it."""
    if not len(rows):
        return
    table = cache.table
    times = np.zeros(table.high_water, dtype=np.int64)
    times[rows] = written
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
