"""What the cache knows of a session: what it may name, read and hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo_proto.layout import Layout


@dataclass(frozen=True, slots=True)
class SessionLayout:
    """A layout as the session named it, with its registry number in each of its namespaces."""

    numbers: Mapping[int, int]
    layout: Layout
    fingerprint: bytes


@dataclass(slots=True, eq=False)
class Session:
    """An open session. Rights are fixed when it opens; the sets track what it holds."""

    session_id: bytes
    client: str
    namespaces: tuple[int, ...]
    layouts: tuple[SessionLayout, ...]
    variants: NDArray[np.uint16] | None  # readable ones; None: any
    last_used: float = 0.0
    attached: bool = False  # its broker connection is open
    closed: bool = False
    leases: set[int] = field(default_factory=set[int])
    holds: set[int] = field(default_factory=set[int])
    reservations: set[int] = field(default_factory=set[int])

    def can_read(self, variants: NDArray[np.uint16]) -> NDArray[np.bool_]:
        """For each variant whether this session can read it."""
        if self.variants is None:
            return np.ones(len(variants), dtype=np.bool_)
        return np.isin(variants, self.variants)
