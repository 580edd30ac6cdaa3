"""The client: sessions, chains, match, get and put. No policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from octavo.address import default_address, parse_address
from octavo.calls import (
    ask_match,
    chain_message,
    chain_part,
    checked_puts,
    flush_result,
    get_order,
    match_result,
    statistics_of,
)
from octavo.chain import AnyChain, Chain, ForeignChain
from octavo.connection import Connection
from octavo.deadline import Deadline
from octavo.errors import InvalidRequest, NodeBusy, NodeTimeout, NodeUnavailable, OctavoError
from octavo.health import Health
from octavo.results import (
    FlushResult,
    GetResult,
    Hold,
    Match,
    NodeInfo,
    PutResult,
    Statistics,
)
from octavo.session import Session
from octavo.sinks import Sink, Source, row_sink, row_source
from octavo.status import Status, known_statuses
from octavo.terms import TransportChoice, checked_profiles, checked_terms
from octavo.transfer import RowSink, RowSource, page_window, wanted_transfer
from octavo.transport.base import GetReport, PutReport
from octavo_proto import columns
from octavo_proto.layout import Layout
from octavo_proto.v1 import admin_pb2, cache_pb2

Answer = TypeVar("Answer")

TIMEOUT_S: Final = 5.0
FLUSH_TIMEOUT_S: Final = 60.0


class Client:
    """A worker's way to the KV pages of a node. Safe for use by several threads.

    Nothing is dialled before the first call. A node that is absent, hung or restarted is a miss
    of ``match``, ``get`` and ``put`` within the deadline, counted in ``health``; it is noticed
    when it comes back. A node that *refuses* (settings that disagree) raises SessionRefused.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        layouts: Sequence[Layout],
        namespaces: Sequence[str] = ("default",),
        transport: TransportChoice = "auto",
        timeout_s: float = TIMEOUT_S,
        variants: Sequence[int] = (),
        profile: str = "exact",
        profiles: Mapping[str, str] | None = None,
    ) -> None:
        """``address``: ``unix:/path`` or ``host:port``; None means ``$OCTAVO_ADDRESS``, else the
        default socket. ``variants``: those this client can read, by preference; empty: any.

        ``profile`` says how sources that pack do so (a name of ``octavo.codec.PROFILES`` or of a
        codec), and ``profiles`` says it for single namespaces. What lies at the node stays
        readable whatever it was packed with.

        Raises:
            InvalidRequest: an argument is wrong; the message says which.
        """
        if not timeout_s > 0:
            raise InvalidRequest(f"timeout_s is {timeout_s}, must be above 0")
        self._timeout_s = timeout_s
        terms = checked_terms(layouts, namespaces, variants, transport)
        self.profiles: Final = checked_profiles(terms, profile, profiles)
        where = parse_address(default_address() if address is None else address)
        self._connection = Connection(where, terms)
        self._terms = terms

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return str(self._connection.address)

    @property
    def node(self) -> NodeInfo | None:
        """The node, while a session is open."""
        session = self._connection.session_if_open
        return None if session is None else session.node

    @property
    def transport_name(self) -> str | None:
        """``shm`` or ``grpc``, while a session is open."""
        session = self._connection.session_if_open
        return None if session is None else session.transport.name

    @property
    def health(self) -> Health:
        """What was swallowed so far."""
        return self._connection.health.snapshot(self._connection.breaker.state)

    def connect(self, timeout_s: float | None = None) -> NodeInfo:
        """Opens the session now.

        Raises:
            ConnectError, NodeTimeout: no node answers; the message says where it was sought.
            SessionRefused: the node's settings disagree.
        """
        deadline = self._deadline(timeout_s)
        try:
            return self._connection.attempt(deadline, lambda session, _retry: session.node)
        except NodeUnavailable as error:
            raise type(error)(f"no node at {self.address}: {error}") from error

    def chain(
        self,
        token_ids: Iterable[int] = (),
        layout: str | None = None,
        namespace: str | None = None,
    ) -> Chain:
        """A prompt's chain; layout and namespace default to the first ones."""
        terms = self._terms
        chain = Chain(terms.layout(layout), terms.namespace(namespace), self._namespace_key)
        chain.extend(token_ids)
        return chain

    def foreign_chain(
        self, keys: Sequence[bytes], layout: str | None = None, namespace: str | None = None
    ) -> ForeignChain:
        """Unlinked pages under another system's keys, for a foreign layout."""
        terms = self._terms
        return ForeignChain(
            terms.layout(layout), terms.namespace(namespace), self._namespace_key, keys
        )

    def match(
        self, chain: AnyChain, hold: bool = False, *, timeout_s: float | None = None
    ) -> Match:
        """The longest present prefix. With ``hold`` it stays, and loads from NVMe begin."""
        if chain.page_count == 0:
            return Match()

        def act(session: Session, _is_retry: bool) -> Match:
            request = ask_match(session, self._message(session, chain), hold=hold)
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
        rows = row_sink(sink)

        def act(session: Session, _is_retry: bool) -> GetReport:
            # A hold belongs to its session; on another one the chain is sought afresh.
            hold_id = 0
            if hold is not None and hold.session is session and hold.end():
                hold_id = hold.hold_id
            message = self._message(session, chain, transfer.page_end)
            rows.begin(transfer)
            order = get_order(session, message, hold_id, transfer, wait_pending, deadline)
            report = session.transport.get(order, rows)
            if hold_id and not report.bytes_copied and report.statuses[0] == Status.EXPIRED:
                # The hold had run out; what it held may well be there still.
                self._connection.health.count("hold_expired")
                order = get_order(session, message, 0, transfer, wait_pending, deadline)
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
        timeout_s: float | None = None,
    ) -> PutResult:
        """Stores what is missing of a chain. Offer the whole chain: what is there is only touched.

        ``positions``: the pages that this call puts, ascending, where other sessions put those
        between them (see ``octavo.shards``); None means all. The result is about these alone.
        ``variants``: how pages are packed, one for all or one a page; None asks the source.
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
        rows = row_source(source)

        def act(session: Session, _is_retry: bool) -> PutReport:
            message = chain_part(self._message(session, chain, transfer.page_end), first_page)
            rows.begin(transfer)
            order = checked_puts(session, message, transfer, rows, variants, deadline)
            return session.transport.put_in_rounds(order, rows)

        deadline = self._deadline(timeout_s)
        missed = PutReport(np.full(transfer.row_count, Status.UNAVAILABLE, dtype=np.uint8), 0.0, 0)
        report = self._or_miss("put", deadline, act, missed)
        return PutResult(
            statuses=report.statuses,
            units_per_page=len(transfer.units),
            worker_s=report.worker_s,
            total_s=time.monotonic() - started_s,
            bytes_put=report.bytes_put,
        )

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
            statuses = known_statuses(columns.read("statuses", response.statuses, columns.U8))
            return [Status(number) for number in statuses.tolist()]

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

    def close(self) -> None:
        """Ends the session and unmaps the node's memory. Later calls raise ClientClosed."""
        self._connection.close()

    def _or_miss(
        self,
        operation: str,
        deadline: Deadline,
        act: Callable[[Session, bool], Answer],
        miss: Answer,
    ) -> Answer:
        """What ``act`` answers, or the miss if there is nobody to answer. Counted, never raised."""
        connection = self._connection
        if not connection.breaker.admit():
            connection.health.count(f"skipped_{operation}")
            return miss
        try:
            return connection.attempt(deadline, act)
        except NodeTimeout as error:
            connection.health.failure(f"miss_{operation}_timeout", error)
        except NodeBusy as error:
            connection.health.failure(f"miss_{operation}_busy", error)
        except NodeUnavailable as error:
            connection.health.failure(f"miss_{operation}_unavailable", error)
        return miss

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

    def _message(
        self, session: Session, chain: AnyChain, page_end: int | None = None
    ) -> cache_pb2.Chain:
        return chain_message(
            session,
            chain,
            self._terms.namespace_index(chain.namespace),
            self._terms.layout_index(chain.layout.name),
            chain.page_count if page_end is None else page_end,
        )

    def _namespace_key(self, namespace: str) -> bytes:
        deadline = self._deadline(None)
        return self._connection.attempt(
            deadline, lambda session, _retry: session.namespace_key(namespace)
        )

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)
