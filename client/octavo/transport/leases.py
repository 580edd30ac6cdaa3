"""Leases of one get: released as their copies end, renewed while a copy is long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.deadline import Deadline
from octavo.delivery import DeliveryLedger
from octavo.errors import OctavoError
from octavo.health import HealthRecorder
from octavo.transport.base import RENEW_SHARE
from octavo.wire import Pending, Wire, finish
from octavo_proto import columns
from octavo_proto.v1 import cache_pb2

RELEASE_GRACE_S = 1.0
"""A release is worth sending after the deadline as well: it frees the node's memory."""


class Leases:
    """The leases that the node granted one get. Used by one thread."""

    def __init__(
        self,
        wire: Wire,
        session_id: bytes,
        deadline: Deadline,
        health: HealthRecorder,
        grace_s: float = RELEASE_GRACE_S,
    ) -> None:
        """``grace_s``: how long beyond the deadline the answers are worth waiting for."""
        self._wire = wire
        self._grace_s = grace_s
        self._session_id = session_id
        self._deadline = deadline
        self._health = health
        self._released: list[tuple[Pending[Any], NDArray[np.int64]]] = []

    def renewer(self, lease_id: int, lease_ms: int) -> Callable[[], None]:
        """A function to call between pieces of a copy; it renews when half the time is gone."""
        interval_s = lease_ms / 1000 * RENEW_SHARE
        due_s = time.monotonic() + interval_s

        def renew_if_due() -> None:
            nonlocal due_s
            if time.monotonic() < due_s:
                return
            due_s = time.monotonic() + interval_s
            request = cache_pb2.RenewRequest(
                session_id=self._session_id,
                lease_ids=columns.write([lease_id], columns.U64),
                duration_ms=lease_ms,
            )
            # Not waited for: if it fails, the release says that the lease had run out.
            self._wire.send(self._wire.cache.Renew, request, self._timeout_s())

        return renew_if_due

    def release(self, lease_id: int, rows: NDArray[np.int64]) -> None:
        """Ends a lease under which ``rows`` were copied; the answer is read in ``settle``."""
        request = cache_pb2.ReleaseRequest(
            session_id=self._session_id, lease_ids=columns.write([lease_id], columns.U64)
        )
        pending = self._wire.start(self._wire.cache.Release, request, self._timeout_s())
        self._released.append((pending, rows))

    def settle(self, ledger: DeliveryLedger) -> None:
        """Reads all answers: rows whose lease had held are good, all others are not."""
        # All share one grace: a node that hangs costs it once, not once a grant.
        until_s = time.monotonic() + max(self._deadline.remaining_s(), self._grace_s)
        for pending, rows in self._released:
            try:
                response = finish(pending, max(0.0, until_s - time.monotonic()))
            except OctavoError as error:
                self._wire.see_off(pending)
                self._health.failure("release_unanswered", error)
                ledger.expired(rows)
                continue
            if response.held == b"\x01":
                ledger.good(rows)
            else:
                self._health.count("lease_expired")
                ledger.expired(rows)
        self._released.clear()

    def _timeout_s(self) -> float:
        return max(self._deadline.remaining_s(), RELEASE_GRACE_S)
