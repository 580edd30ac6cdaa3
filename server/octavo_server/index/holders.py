"""Who holds pages: identities, leases, and what a node knows of them."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Any, Final

from octavo_server.index.entries import HOLDER_ID_MAX

HOLDERS_MAX: Final = 16_384
"""Holders of a cluster: every node reads the list every few seconds."""

TEXT_BYTES_MAX: Final = 256
CANDIDATES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A store of a node, in one life.

    ``store`` is "memory" or the id of an NVMe store. ``incarnation`` is what makes its entries
    void when it changes: the process's boot id for memory, the store's epoch for NVMe, which
    is kept on disk, so that its entries stay true across restarts.
    """

    node_id: str
    store: str
    incarnation: str
    address: str
    """Where peers get its pages."""
    started_ms: int
    """When this process began, on its host's clock: of two incarnations the later one counts."""

    def __post_init__(self) -> None:
        for name in ("node_id", "store", "incarnation", "address"):
            value: str = getattr(self, name)
            size_bytes = len(value.encode())
            if not 1 <= size_bytes <= TEXT_BYTES_MAX or not value.isprintable():
                raise ValueError(
                    f"{name} has {size_bytes} bytes, allowed: 1 to {TEXT_BYTES_MAX}, printable"
                )

    @property
    def name(self) -> str:
        """What one holder at a time may go by."""
        return f"{self.node_id}\n{self.store}"

    def encode(self) -> bytes:
        """A record for the registry."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, record: bytes) -> Holder:
        """Raises ValueError if this is no record of ours."""
        try:
            parts: dict[str, Any] = json.loads(record)
            return cls(
                node_id=str(parts["node_id"]),
                store=str(parts["store"]),
                incarnation=str(parts["incarnation"]),
                address=str(parts["address"]),
                started_ms=int(parts["started_ms"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no holder's record: {error!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How long a holder is named without a heartbeat, and how long it may come back.

    Between the two it has lapsed: nobody names it, and its entries are kept. Memory needs no
    more than a pause of Redis or of the process; a store on NVMe outlives a restart of its host.
    """

    lease_s: float
    keep_s: float

    def __post_init__(self) -> None:
        if not 0 < self.lease_s <= self.keep_s:
            raise ValueError(f"lease_s {self.lease_s}, keep_s {self.keep_s}: 0 < lease <= keep")


MEMORY_TERMS: Final = LeaseTerms(lease_s=6.0, keep_s=60.0)
NVME_TERMS: Final = LeaseTerms(lease_s=6.0, keep_s=86_400.0)


class Renewal(Enum):
    """What a heartbeat learns."""

    RENEWED = auto()
    FORGOTTEN = auto()
    """Retired, or the registry lost its data: register again and announce everything."""
    SUPERSEDED = auto()
    """A later incarnation goes by the name now: this one must not come back."""


@dataclass(frozen=True, slots=True)
class HolderView:
    """The registry as it was at ``taken_s`` on the reader's monotonic clock."""

    holders: Mapping[int, Holder]
    lapses_s: Mapping[int, float]
    """When each lease ends on the reader's clock, if nobody renews it."""
    retired: frozenset[int]
    """Ids whose entries nobody may believe and everybody may remove."""
    taken_s: float

    def is_live(self, holder_id: int, now_s: float) -> bool:
        """Whether to name the holder."""
        return self.lapses_s.get(holder_id, now_s) > now_s

    def knows(self, holder_id: int) -> bool:
        """Whether the id belongs to a holder, be it live or lapsed."""
        return holder_id in self.holders


EMPTY_VIEW: Final = HolderView({}, {}, frozenset(), float("-inf"))


class HolderRegistry(ABC):
    """Gives out holder ids and keeps their leases, on one clock: its own.

    An id is given to one (node, store, incarnation) and to no other while an entry under it
    may exist: a retired id stays reserved until a sweep has passed over everything, and ids are
    drawn at random from 2^31, so that a registry that lost its data does not repeat them.

    All methods raise ``IndexUnavailable`` when the registry cannot be reached in time.
    """

    @abstractmethod
    async def register(self, holder: Holder, terms: LeaseTerms) -> int | None:
        """The holder's id, its lease running. The same incarnation gets its id back.

        Another incarnation under the same name is retired with this, unless it began later and
        its lease runs: then the answer is None, and this one must not come back.
        """

    @abstractmethod
    async def renew(self, holder_id: int, holder: Holder, terms: LeaseTerms) -> Renewal:
        """Starts the lease anew, also if it has lapsed."""

    @abstractmethod
    async def retire(self, holder_id: int) -> None:
        """The holder leaves: from now on nobody names it."""

    @abstractmethod
    async def view(self) -> HolderView:
        """All holders, those retired and not yet swept away as ids only."""

    @abstractmethod
    async def retire_lapsed(self) -> None:
        """Retires holders that lapsed and did not come back within their ``keep_s``."""

    @abstractmethod
    async def bury(self, holder_ids: frozenset[int]) -> None:
        """Forgets retired ids: a whole sweep has passed since they were retired."""


def draw_holder_ids() -> list[int]:
    """Candidates for a new id."""
    return [1 + secrets.randbelow(HOLDER_ID_MAX) for _ in range(CANDIDATES)]
