"""The interface of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod

from octavo_server.cache.page_table import Rows


class EvictionPolicy(ABC):
    """Ranks pages; it neither moves nor drops them.

    A policy sees every use of a page and answers which of some candidates should go first.
    It must never rank a page before a page that was used with it and lies behind it in their
    chain: chains lose their tail first. Calls come from the event loop, one at a time.
    """

    @abstractmethod
    def touch(self, rows: Rows) -> None:
        """Pages were put or got. ``rows`` are in chain order, heads first."""

    @abstractmethod
    def first_victims(self, candidates: Rows, count: int) -> Rows:
        """At most ``count`` of ``candidates``, those to go first at the front."""
