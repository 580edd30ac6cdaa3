"""Delete, Clear, quarantine, and letting go of what was withdrawn while in use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.chains import ChainView, check_distinct
from octavo_server.cache.matching import is_pending
from octavo_server.cache.page_table import NEVER, Rows
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import DONE, MISSING, PENDING
from octavo_server.errors import Unavailable

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache


async def delete(cache: PageCache, session: Session, chain: ChainView) -> NDArray[np.uint8]:
    """See ``PageCache.delete``. Deleting needs no readable variant, only the namespace."""
    check_distinct(chain)
    rows = cache.table.find(chain.keys, chain.namespace)
    statuses = np.full(len(rows), MISSING, dtype=np.uint8)
    table = cache.table
    statuses[(rows >= 0) & ((table.memory_mask[rows] | table.nvme_mask[rows]) != 0)] = DONE
    statuses[is_pending(cache, rows)] = PENDING
    await _remove(cache, rows[statuses == DONE])
    return statuses


async def clear(cache: PageCache, namespace: int, layout: int | None) -> int:
    """See ``PageCache.clear``. Pages being written are removed as well: their puts expire."""
    table = cache.table
    rows = table.live_rows()
    chosen = (table.namespace[rows] == namespace) & ~table.withdrawn[rows]
    if layout is not None:
        chosen &= table.layout[rows] == layout
    rows = rows[chosen]
    counted = (table.memory_mask[rows] | table.nvme_mask[rows]) == table.full_mask[rows]
    await _remove(cache, rows)
    return int(counted.sum())


def expire(cache: PageCache, rows: Rows) -> None:
    """Drops pages whose time has passed. Nobody waits for the log to say so: their records there
    tell when they expired."""
    if not len(rows):
        return
    table = cache.table
    cache.counters.add("expired_pages", int(table.is_begun(rows).sum()))
    table.expires_ms[rows] = NEVER  # the next put of the same page says anew
    _take_away(cache, rows, deleted=False)


def quarantine(cache: PageCache, rows: Rows) -> None:
    """Pages whose bytes failed their check on NVMe are never read from there again.

    They are withdrawn as a whole: other units of theirs may still be on their way into memory,
    and a put of the same page must not meet them there. It gets a row of its own.
    """
    cache.counters.add("quarantined_pages", len(rows))
    assert cache.nvme is not None
    cache.nvme.withdraw(rows)
    cache.table.withdraw(rows)


def drop_content(cache: PageCache, rows: Rows) -> None:
    """Takes pages out of all tiers; their rows stay. Nobody may hold or write them."""
    cache.memory.drop(rows)
    cache.keeping.let_go(rows)
    if cache.nvme is not None:
        cache.nvme.withdraw(rows)


def let_go(cache: PageCache, rows: Rows) -> None:
    """Nothing needs these any more: they were withdrawn, or nothing is left of them."""
    drop_content(cache, rows)
    cache.table.drop_unused(rows)


async def _remove(cache: PageCache, rows: Rows) -> None:
    """Makes pages unfindable now, and returns when a restart can't bring them back either."""
    table = cache.table
    has_content = (table.memory_mask[rows] | table.nvme_mask[rows]) != 0
    cache.counters.add("deleted_pages", int(has_content.sum()))
    # A page that is being written to NVMe gets there, and is forgotten right after.
    writes = cache.nvme.writes_of(rows) if cache.nvme is not None else ()
    forgotten = _take_away(cache, rows, deleted=True)
    if writes:
        await asyncio.wait(writes)
    if forgotten is not None and not await asyncio.shield(forgotten):
        raise Unavailable(
            f"{len(rows)} pages are removed, but the NVMe device did not take that: until it takes "
            "the next write, a restart may bring them back"
        )


def _take_away(cache: PageCache, rows: Rows, *, deleted: bool) -> asyncio.Task[bool] | None:
    """Makes pages unfindable now. The task, if any of them lay on NVMe, ends when the log knows."""
    table = cache.table
    forgotten = cache.nvme.withdraw(rows, deleted=deleted) if cache.nvme is not None else None
    busy = (table.pins[rows] != 0) | (table.reserved_mask[rows] != 0)
    # What is leased or being filled keeps its memory until that ends, but nobody finds it.
    table.withdraw(rows[busy])
    idle = rows[~busy]
    cache.memory.drop(idle)
    cache.keeping.let_go(idle)
    table.drop_unused(idle)
    cache.pins.on_room()
    return forgotten
