"""Retain: how long pages stay, as requests wish it. Wishes come with a put or by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache import removing
from octavo_server.cache.chains import ChainView, check_distinct
from octavo_server.cache.matching import is_present, leading
from octavo_server.cache.page_table import Rows
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import DONE, MISSING, QUOTA_EXCEEDED

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache


@dataclass(frozen=True, slots=True)
class Retention:
    """A request's wish for its pages. 0 is none: they may stay for ever, and may be evicted."""

    ttl_s: float = 0.0
    """They are gone after this."""
    pin_s: float = 0.0
    """They are not evicted for so long."""


NO_WISH = Retention()


def retain(
    cache: PageCache, session: Session, chain: ChainView, wish: Retention, *, unpin: bool
) -> NDArray[np.uint8]:
    """See ``PageCache.retain``."""
    check_distinct(chain)
    rows = cache.table.find(chain.keys, chain.namespace)
    present = is_present(cache, session, chain, rows)
    if not chain.unlinked:
        present[leading(present) :] = False
    statuses = np.where(present, DONE, MISSING).astype(np.uint8)
    wanted = rows[present]
    if unpin:
        cache.keeping.let_go(wanted)
    if wish.ttl_s:
        _log_again(cache, cache.lifetimes.prolong(wanted, wish.ttl_s))
    if wish.pin_s:
        refused = ~_pin(cache, wanted, wish.pin_s)
        statuses[np.flatnonzero(present)[refused]] = QUOTA_EXCEEDED
    return statuses


def drop_expired(cache: PageCache, chain: ChainView) -> None:
    """Before a chain is put: what of it has expired makes way."""
    if cache.lifetimes.in_use:
        rows = cache.table.find(chain.keys, chain.namespace)
        rows = rows[rows >= 0]
        removing.expire(cache, rows[cache.lifetimes.expired(rows)])


def limit_offered(cache: PageCache, chain: ChainView, rows: Rows, wish: Retention) -> None:
    """Pages are put, or offered to be: from now on they live so long."""
    mine = rows[cache.table.layout[rows] == chain.layout_number]
    _log_again(cache, cache.lifetimes.put(mine, wish.ttl_s))


def pin_offered(
    cache: PageCache, chain: ChainView, positions: NDArray[np.int64], wish: Retention
) -> int:
    """Pins those pages of a chain that are here or reserved, right after their reserve. How many
    had no room in what pins may keep."""
    if not wish.pin_s:
        return 0
    table = cache.table
    rows = table.find(chain.keys[positions], chain.namespace)
    rows = rows[(rows >= 0) & (table.layout[rows] == chain.layout_number)]
    return int((~_pin(cache, rows[table.is_begun(rows)], wish.pin_s)).sum())


def _pin(cache: PageCache, rows: Rows, pin_s: float) -> NDArray[np.bool_]:
    granted = cache.keeping.keep(rows, pin_s)
    cache.counters.add("pin_granted_pages", int(granted.sum()))
    cache.counters.add("pin_refused_pages", int((~granted).sum()))
    return granted


def _log_again(cache: PageCache, rows: Rows) -> None:
    if cache.nvme is not None:
        cache.nvme.log_again(rows)
