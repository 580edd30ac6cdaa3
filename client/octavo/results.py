"""What match, get and put answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from octavo.status import Status, Tier, counts_by_status

if TYPE_CHECKING:
    from octavo.chain import AnyChain
    from octavo.session import Session


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The node that a client is connected to."""

    node_id: str
    boot_id: str
    """New on every start of the node."""
    server: str
    features: tuple[str, ...]
    address: str


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive matched pages in one place."""

    tier: Tier
    node: str
    """Empty for the node that answered."""
    page_count: int
    load_s: float
    """Estimated time until these pages could be granted."""


class Hold:
    """A pin on what a match found. Ends with a get, with ``release``, or by time."""

    def __init__(
        self,
        hold_id: int,
        chain: AnyChain,
        page_count: int,
        hold_s: float,
        session: Session,
        release: Callable[[Hold], bool],
    ) -> None:
        self.hold_id = hold_id
        self.chain = chain
        self.page_count = page_count
        self.hold_s = hold_s
        self.session = session
        self._release = release
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def end(self) -> bool:
        """Marks it as ended; whether this call was the first to do so."""
        first, self._ended = not self._ended, True
        return first

    def release(self) -> bool:
        """Ends the hold; whether it had held until now. Harmless a second time."""
        return self._release(self) if self.end() else False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest present prefix of a chain; a miss has ``page_count`` 0."""

    page_count: int = 0
    token_count: int = 0
    runs: tuple[Run, ...] = ()
    pending_count: int = 0
    """Pages right behind the prefix that another session is writing."""
    present: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Unlinked chains: for each page whether it is present. Empty otherwise."""
    hold: Hold | None = None

    @property
    def load_s(self) -> float:
        """Estimated time until the last matched page could be granted."""
        return max((run.load_s for run in self.runs), default=0.0)


@dataclass(frozen=True, slots=True)
class GetResult:
    """One status for each page asked for. Only bytes of ``DONE`` pages may be used."""

    statuses: NDArray[np.uint8]
    bytes_copied: int = 0

    @property
    def page_count(self) -> int:
        """Leading pages that are delivered whole, each copied while its lease held."""
        missed = np.flatnonzero(self.statuses != Status.DONE)
        return int(missed[0]) if len(missed) else len(self.statuses)

    @property
    def counts(self) -> dict[Status, int]:
        return counts_by_status(self.statuses)


@dataclass(frozen=True, slots=True)
class PutResult:
    """One status for each unit offered: row = page * units_per_page + rank of the unit."""

    statuses: NDArray[np.uint8]
    units_per_page: int = 1
    worker_s: float = 0.0
    """From the call until the source's buffers were free again."""
    total_s: float = 0.0
    """From the call until everything put was visible."""
    bytes_put: int = 0
    unpinned_pages: int = 0
    """Pages that were to be pinned, and for which pins left no room: they are put all the same."""

    @property
    def stored_pages(self) -> int:
        """Pages that are visible now and of which this put stored at least one unit."""
        by_page = self._by_page()
        good = (by_page == Status.STORED) | (by_page == Status.ALREADY_PRESENT)
        stored = (by_page == Status.STORED).any(axis=1)
        return int(np.count_nonzero(good.all(axis=1) & stored))

    @property
    def present_pages(self) -> int:
        """Pages of which everything offered was there already."""
        return int(np.count_nonzero((self._by_page() == Status.ALREADY_PRESENT).all(axis=1)))

    @property
    def failed_pages(self) -> int:
        """Pages of which something offered neither was there nor is now."""
        return len(self._by_page()) - self.stored_pages - self.present_pages

    @property
    def counts(self) -> dict[Status, int]:
        return counts_by_status(self.statuses)

    def _by_page(self) -> NDArray[np.uint8]:
        return self.statuses.reshape(-1, self.units_per_page)


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Pages of the session's namespaces in memory: safe from a crash, and not."""

    durable_pages: int
    volatile_pages: int


@dataclass(frozen=True, slots=True)
class TierStatistics:
    tier: str
    capacity_bytes: int
    used_bytes: int
    """Bytes of slots in use."""
    page_bytes: int
    """Bytes of page content in them."""
    page_count: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """A node's counters and gauges."""

    node_id: str
    boot_id: str
    version: str
    uptime_s: float
    tiers: tuple[TierStatistics, ...]
    counters: dict[str, int]
    gauges: dict[str, float]
    problems: tuple[str, ...]
