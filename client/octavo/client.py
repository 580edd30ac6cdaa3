"""The client: sessions, chains, match, get and put. No policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from octavo.calls import (
    ask_match,
    chain_part,
    checked_puts,
    flush_result,
    get_order,
    match_result,
    statistics_of,
    statuses_of,
)
from octavo.chain import AnyChain
from octavo.client_core import TIMEOUT_S, ClientCore
from octavo.errors import InvalidRequest, OctavoError
from octavo.results import FlushResult, GetResult, Hold, Match, PutResult, Statistics
from octavo.session import Session
from octavo.sinks import Sink, Source, row_sink, row_source
from octavo.status import Status
from octavo.transfer import RowSink, RowSource, page_window, wanted_transfer
from octavo.transport.base import GetReport, PutReport
from octavo.wishes import (
    HINTS_FEATURE,
    RETENTION_FEATURE,
    SessionHint,
    hint_message,
    retention_for,
    retention_message,
)
from octavo_proto import columns
from octavo_proto.v1 import admin_pb2, cache_pb2

__all__ = ["TIMEOUT_S", "Client"]

FLUSH_TIMEOUT_S: Final = 60.0


class Client(ClientCore):
    """A worker's way to the KV pages of a node. Safe for use by several threads.

    Nothing is dialled before the first call. A node that is absent, hung or restarted is a miss
    of ``match``, ``get`` and ``put`` within the deadline, counted in ``health``; it is noticed
    when it comes back. A node that *refuses* (settings that disagree) raises SessionRefused.
    """

    def match(
        self,
        chain: AnyChain,
        hold: bool = False,
        *,
        hint: SessionHint | None = None,
        timeout_s: float | None = None,
    ) -> Match:
        """The longest present prefix. With ``hold`` it stays, and loads from NVMe begin."""
        told = hint_message(hint)
        if chain.page_count == 0:
            return Match()

        def act(session: Session, _is_retry: bool) -> Match:
            request = ask_match(session, self._message(session, chain), hold=hold, hint=told)
            response = session.wire.unary(session.wire.cache.Match, request, deadline)
            return match_result(response, chain, session, self._release_hold)

        deadline = self._deadline(timeout_s)
        return self._or_miss("match", deadline, act, Match())

    def get(
        self,
        wanted: AnyChain | Hold,
        sink: Sink | RowSink,
        *,
        first_page: int = 0,
        page_count: int | None = None,
        units: int | Iterable[int] | None = None,
        wait_pending: bool = False,
        hint: SessionHint | None = None,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Copies pages of a chain, or of a hold (which ends), into ``sink`` as they arrive.

        ``units``: a mask or a set of unit indices; None means all. ``wait_pending``: wait for
        pages that another session is writing.
        """
        hold = wanted if isinstance(wanted, Hold) else None
        chain = wanted.chain if isinstance(wanted, Hold) else wanted
        page_end = hold.page_count if hold is not None else chain.page_count
        window = page_window(page_end, first_page, page_count)
        transfer = wanted_transfer(chain.layout, window, units)
        if transfer.page_count == 0:
            return GetResult(np.zeros(0, dtype=np.uint8))
        rows, told = row_sink(sink), hint_message(hint)

        def act(session: Session, _is_retry: bool) -> GetReport:
            # A hold belongs to its session; on another one the chain is sought afresh.
            hold_id = 0
            if hold is not None and hold.session is session and hold.end():
                hold_id = hold.hold_id
            message = self._message(session, chain, transfer.page_end)
            rows.begin(transfer)
            order = get_order(session, message, hold_id, transfer, wait_pending, deadline, told)
            report = session.transport.get(order, rows)
            if hold_id and not report.bytes_copied and report.statuses[0] == Status.EXPIRED:
                # The hold had run out; what it held may well be there still.
                self._connection.health.count("hold_expired")
                order = get_order(session, message, 0, transfer, wait_pending, deadline, told)
                report = session.transport.get(order, rows)
            return report

        deadline = self._deadline(timeout_s)
        missed = GetReport(np.full(transfer.page_count, Status.UNAVAILABLE, dtype=np.uint8), 0)
        report = self._or_miss("get", deadline, act, missed)
        return GetResult(report.statuses, report.bytes_copied)

    def put(
        self,
        chain: AnyChain,
        source: Source | RowSource,
        *,
        first_page: int = 0,
        page_count: int | None = None,
        units: int | Iterable[int] | None = None,
        positions: ArrayLike | None = None,
        variants: int | Sequence[int] | None = None,
        ttl_s: float | None = None,
        pin_s: float | None = None,
        hint: SessionHint | None = None,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Stores what is missing of a chain. Offer the whole chain: what is there is only touched.

        ``positions``: the pages that this call puts, ascending, where other sessions put those
        between them (see ``octavo.shards``); None means all. The result is about these alone.
        ``variants``: how pages are packed, one for all or one a page; None asks the source.
        ``ttl_s``: the pages are gone after it; None wishes them for ever, and of several wishes
        for one page the longest holds. ``pin_s``: they are not evicted for so long.
        """
        started_s = time.monotonic()
        transfer = wanted_transfer(
            chain.layout,
            page_window(chain.page_count, first_page, page_count),
            units,
            positions,
            self.profiles.of(chain.namespace),
        )
        if transfer.page_count == 0:
            return PutResult(np.zeros(0, dtype=np.uint8), len(transfer.units))
        rows, told = row_source(source), hint_message(hint)
        wish = retention_message(ttl_s, pin_s)

        def act(session: Session, _is_retry: bool) -> PutReport:
            message = chain_part(self._message(session, chain, transfer.page_end), first_page)
            rows.begin(transfer)
            heard, may_pin = retention_for(session.node, wish)
            order = checked_puts(session, message, transfer, rows, variants, deadline, heard, told)
            report = session.transport.put_in_rounds(order, rows)
            return report if may_pin else replace(report, unpinned_pages=transfer.page_count)

        deadline = self._deadline(timeout_s)
        missed = PutReport(np.full(transfer.row_count, Status.UNAVAILABLE, dtype=np.uint8), 0.0, 0)
        report = self._or_miss("put", deadline, act, missed)
        return PutResult(
            statuses=report.statuses,
            units_per_page=len(transfer.units),
            worker_s=report.worker_s,
            total_s=time.monotonic() - started_s,
            bytes_put=report.bytes_put,
            unpinned_pages=report.unpinned_pages,
        )

    def retain(
        self,
        chain: AnyChain,
        *,
        ttl_s: float | None = None,
        pin_s: float | None = None,
        unpin: bool = False,
        timeout_s: float | None = None,
    ) -> list[Status]:
        """Changes how long present pages stay; a status for each: DONE, MISSING, or
        QUOTA_EXCEEDED where pins left no room.

        ``ttl_s``: they live at least so long from now, if they are to expire at all. ``pin_s``:
        they are not evicted for so long. ``unpin``: earlier pins end first, whosever they are.

        Raises:
            NodeUnavailable: nobody answered, so nothing is known to have changed.
            InvalidRequest: a senseless duration, or a node that can do neither.
        """
        wish = retention_message(ttl_s, pin_s)
        if chain.page_count == 0:
            return []

        def act(session: Session, _is_retry: bool) -> list[Status]:
            if RETENTION_FEATURE not in session.node.features:
                raise InvalidRequest(f"node {session.node.server} can neither pin nor expire pages")
            request = cache_pb2.RetainRequest(
                session_id=session.session_id,
                chain=self._message(session, chain),
                retention=wish,
                unpin=unpin,
            )
            response = session.wire.unary(session.wire.cache.Retain, request, deadline)
            return statuses_of(response.statuses)

        deadline = self._deadline(timeout_s)
        return self._connection.attempt(deadline, act)

    def hint(
        self,
        hint: SessionHint,
        chain: AnyChain | None = None,
        *,
        namespace: str | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Tells what is known of a conversation; whether a node heard it, which never raises for
        want of a node. ``chain``: its pages, if they are at hand; else ``namespace`` is where it
        belongs.
        """
        told = hint.message()

        def act(session: Session, _is_retry: bool) -> bool:
            if HINTS_FEATURE not in session.node.features:
                return False
            index = self._terms.namespace_index(namespace)
            message = cache_pb2.Chain(namespace_index=index)
            if chain is not None:
                message = self._message(session, chain)
            request = cache_pb2.HintRequest(session_id=session.session_id, chain=message, hint=told)
            session.wire.unary(session.wire.cache.Hint, request, deadline)
            return True

        deadline = self._deadline(timeout_s)
        return self._or_miss("hint", deadline, act, False)

    def delete(self, chain: AnyChain, *, timeout_s: float | None = None) -> list[Status]:
        """Removes a chain's pages from every tier; a status for each.

        Raises:
            NodeUnavailable: nobody answered, so nothing is known to be removed.
        """
        if chain.page_count == 0:
            return []

        def act(session: Session, _is_retry: bool) -> list[Status]:
            request = cache_pb2.DeleteRequest(
                session_id=session.session_id, chain=self._message(session, chain)
            )
            response = session.wire.unary(session.wire.cache.Delete, request, deadline)
            return statuses_of(response.statuses)

        deadline = self._deadline(timeout_s)
        return self._connection.attempt(deadline, act)

    def clear(
        self,
        namespace: str | None = None,
        layout: str | None = None,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Removes all pages of a namespace, or those of one layout; how many there were.

        Raises:
            NodeUnavailable: nobody answered.
        """
        fingerprint = b"" if layout is None else self._terms.layout(layout).fingerprint()

        def act(session: Session, _is_retry: bool) -> int:
            request = cache_pb2.ClearRequest(
                session_id=session.session_id,
                namespace_index=self._terms.namespace_index(namespace),
                layout_fingerprint=fingerprint,
            )
            response = session.wire.unary(session.wire.cache.Clear, request, deadline)
            return int(response.page_count)

        deadline = self._deadline(timeout_s)
        return self._connection.attempt(deadline, act)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> FlushResult:
        """Waits until what was put before is durable.

        Raises:
            NodeUnavailable: nobody answered in time.
        """

        def act(session: Session, _is_retry: bool) -> FlushResult:
            request = cache_pb2.FlushRequest(session_id=session.session_id)
            return flush_result(session.wire.unary(session.wire.cache.Flush, request, deadline))

        deadline = self._deadline(timeout_s)
        return self._connection.attempt(deadline, act)

    def statistics(self, *, timeout_s: float | None = None) -> Statistics:
        """The node's counters.

        Raises:
            NodeUnavailable: nobody answered.
        """

        def act(session: Session, _is_retry: bool) -> Statistics:
            request = admin_pb2.GetStatisticsRequest()
            return statistics_of(
                session.wire.unary(session.wire.admin.GetStatistics, request, deadline)
            )

        deadline = self._deadline(timeout_s)
        return self._connection.attempt(deadline, act)

    def _release_hold(self, hold: Hold) -> bool:
        session = hold.session
        if not session.alive:
            return False
        request = cache_pb2.ReleaseRequest(
            session_id=session.session_id, hold_ids=columns.write([hold.hold_id], columns.U64)
        )
        try:
            response: Any = session.wire.unary(
                session.wire.cache.Release, request, self._deadline(None)
            )
        except OctavoError as error:  # the hold then ends by its own time
            self._connection.health.failure("hold_release_failed", error)
            return False
        return bool(response.held == b"\x01")
