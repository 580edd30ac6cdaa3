"""Match: which pages of a chain are here, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.chains import ChainView
from octavo_server.cache.leases import Hold
from octavo_server.cache.page_table import NO_ROW, Rows
from octavo_server.cache.session import Session

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache

_NVME_BYTES_PER_S: Final = 1.5e9
_NVME_LATENCY_S: Final = 0.0005
"""What a load is estimated with until loads have been measured."""


@dataclass(frozen=True, slots=True)
class Match:
    """``rows`` of all pages asked for; which of them are present; how many lead, and wait.

    ``in_memory`` says where each of the leading pages lies: memory, else NVMe.
    """

    rows: Rows
    present: NDArray[np.bool_]
    page_count: int
    in_memory: NDArray[np.bool_]
    pending_count: int


def match(cache: PageCache, session: Session, chain: ChainView) -> Match:
    """See ``PageCache.match``."""
    rows = cache.table.find(chain.keys, chain.namespace)
    present = is_present(cache, session, chain, rows)
    page_count = int(present.sum()) if chain.unlinked else leading(present)
    prefix = rows[present] if chain.unlinked else rows[:page_count]
    table = cache.table
    in_memory = table.memory_mask[prefix] == table.full_mask[prefix]
    pending = 0 if chain.unlinked else leading(is_pending(cache, rows[page_count:]))
    cache.counters.add("match_calls")
    cache.counters.add("match_pages_asked", len(chain))
    cache.counters.add("match_pages_present", page_count)
    return Match(rows, present, page_count, in_memory, pending)


def hold(
    cache: PageCache, session: Session, chain: ChainView, found: Match, duration_s: float
) -> Hold | None:
    """See ``PageCache.hold``."""
    if not found.page_count:
        return None
    table = cache.table
    # Of unlinked pages those that are present, and of others the prefix. A page that is still
    # incomplete must not be held: its units may get other places.
    rows = found.rows if chain.unlinked else found.rows[: found.page_count]
    rows = np.where(found.present[: len(rows)], rows, np.int32(NO_ROW)).astype(np.int32)
    credit = int(
        cache.limits.hold_share_max * cache.memory.arena.capacity_bytes
    ) - cache.leases.held_bytes(session)
    sizes = np.cumsum(page_bytes(cache, rows[rows >= 0]))
    held = int(np.searchsorted(sizes, credit, side="right"))
    pinned = rows[rows >= 0][:held]
    if not held:
        return None
    kept = rows.copy()
    kept[np.flatnonzero(rows >= 0)[held:]] = NO_ROW  # beyond the session's credit: not held
    made = cache.leases.hold(session, chain, kept, pinned, int(sizes[held - 1]), duration_s)
    cache.policy.touch(pinned)
    if cache.loader is not None:
        all_units = np.arange(chain.layout.layout.unit_count, dtype=np.int32)
        waiting = pinned[table.memory_mask[pinned] != table.full_mask[pinned]]
        cache.loader.start(waiting, all_units)
    return made


def is_present(
    cache: PageCache, session: Session, chain: ChainView, rows: Rows
) -> NDArray[np.bool_]:
    """Whether each page is complete, of the chain's layout, and readable by the session, and not
    expired."""
    table = cache.table
    here = table.memory_mask[rows] | table.nvme_mask[rows]
    present: NDArray[np.bool_] = (
        (rows >= 0) & (here == table.full_mask[rows]) & (table.layout[rows] == chain.layout_number)
    )
    present &= ~table.withdrawn[rows]  # a hold may know a page that was deleted since
    if cache.lifetimes.in_use:
        present &= ~cache.lifetimes.expired(rows)
    if session.variants is not None:
        present &= session.can_read(table.variant[rows])
    return present


def is_pending(cache: PageCache, rows: Rows) -> NDArray[np.bool_]:
    """Whether each page is not complete yet and being written."""
    table = cache.table
    pending: NDArray[np.bool_] = (rows >= 0) & (table.reserved_mask[rows] != 0)
    return pending


def leading(flags: NDArray[np.bool_]) -> int:
    """How many flags are set before the first one that isn't."""
    return len(flags) if flags.all() else int(np.argmin(flags))


def page_bytes(cache: PageCache, rows: Rows) -> NDArray[np.int64]:
    """Bytes of each page, all units together."""
    table = cache.table
    owners, units = table.expanded(rows)
    return np.bincount(owners, weights=table.units.length[units], minlength=len(rows)).astype(
        np.int64
    )


def load_seconds(cache: PageCache, rows: Rows) -> float:
    """Estimated time until these pages, which lie on NVMe, could be granted."""
    rate = _NVME_BYTES_PER_S
    if cache.loader is not None:
        rate = cache.loader.bytes_per_s or rate
    return _NVME_LATENCY_S + float(page_bytes(cache, rows).sum()) / rate
