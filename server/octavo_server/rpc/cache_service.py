"""The Cache service: requests in, plain calls of the page cache, answers out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, closing
from dataclasses import dataclass

import numpy as np

from octavo_proto import columns
from octavo_proto.v1 import cache_pb2, cache_pb2_grpc
from octavo_server.bulk.tickets import BulkPort
from octavo_server.cache.chains import ChainView, read_chain, unit_indices
from octavo_server.cache.getting import GetPages
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import EXPIRED
from octavo_server.errors import RequestError, Unavailable
from octavo_server.rpc import requests
from octavo_server.rpc.answers import limits_of, runs_of
from octavo_server.rpc.delivery import BulkDelivery, Delivery, GrantDelivery, InlineDelivery
from octavo_server.rpc.put import receive_units
from octavo_server.rpc.sessions import Sessions
from octavo_server.rpc.status import Context, answered, streamed
from octavo_server.rpc.wishes import hear, hint_of, retention_of


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the node says of itself when a session opens."""

    node_id: str
    boot_id: str
    version: str
    features: tuple[str, ...]
    broker_path: str


class CacheService(cache_pb2_grpc.CacheServicer):
    """Checks requests and hands them to the cache; see ``cache.proto`` for what each promises."""

    def __init__(
        self, cache: PageCache, sessions: Sessions, facts: NodeFacts, bulk: BulkPort | None
    ) -> None:
        """``bulk``: None where the node serves no bulk streams."""
        self._cache = cache
        self._sessions = sessions
        self._facts = facts
        self._bulk = bulk

    def _refused(self) -> None:
        self._cache.counters.add("requests_refused")

    def _chain(self, session: Session, chain: cache_pb2.Chain) -> ChainView:
        return read_chain(session, chain, self._cache.limits.chain_pages_max)

    async def OpenSession(  # noqa: N802 - named by the protocol, like all below
        self, request: cache_pb2.OpenSessionRequest, context: Context
    ) -> cache_pb2.OpenSessionResponse:
        def refused() -> None:
            self._cache.counters.add("sessions_refused")

        session, namespaces = await answered(context, refused, self._sessions.open(request))
        facts, arena = self._facts, self._cache.memory.arena
        response = cache_pb2.OpenSessionResponse(
            session_id=session.session_id,
            node_id=facts.node_id,
            boot_id=facts.boot_id,
            server=f"octavo/{facts.version}",
            namespaces=namespaces,
            layout_fingerprints=b"".join(entry.fingerprint for entry in session.layouts),
            limits=limits_of(self._cache, self._sessions),
            features=facts.features,
        )
        if request.want_shared_memory and facts.broker_path:
            response.shared_memory.CopyFrom(
                cache_pb2.SharedMemory(
                    broker_path=facts.broker_path,
                    ticket=self._sessions.issue_ticket(session),
                    segment_bytes=arena.segment_bytes,
                    segment_count=len(arena.segments),
                )
            )
        if request.want_bulk and self._bulk is not None:
            response.bulk.CopyFrom(self._bulk.offer(session))
        return response

    async def IssueBulkTicket(  # noqa: N802
        self, request: cache_pb2.IssueBulkTicketRequest, context: Context
    ) -> cache_pb2.IssueBulkTicketResponse:
        async def work() -> cache_pb2.IssueBulkTicketResponse:
            session = self._sessions.find(request.session_id)
            if self._bulk is None:
                raise Unavailable("this node serves no bulk streams")
            return cache_pb2.IssueBulkTicketResponse(ticket=self._bulk.tickets.issue(session))

        return await answered(context, self._refused, work())

    async def CloseSession(  # noqa: N802
        self, request: cache_pb2.CloseSessionRequest, context: Context
    ) -> cache_pb2.CloseSessionResponse:
        async def work() -> cache_pb2.CloseSessionResponse:
            self._sessions.find(request.session_id)
            self._sessions.close(request.session_id)
            return cache_pb2.CloseSessionResponse()

        return await answered(context, self._refused, work())

    async def Match(  # noqa: N802
        self, request: cache_pb2.MatchRequest, context: Context
    ) -> cache_pb2.MatchResponse:
        async def work() -> cache_pb2.MatchResponse:
            session = self._sessions.find(request.session_id)
            chain = self._chain(session, request.chain)
            hear(self._cache.conversations, chain.namespace, request)
            found = self._cache.match(session, chain)
            response = cache_pb2.MatchResponse(
                page_count=found.page_count, pending_count=found.pending_count
            )
            if chain.unlinked:
                response.present = columns.write(found.present, columns.U8)
            else:
                response.runs.extend(runs_of(self._cache, found))
            if request.hold:
                duration_s = requests.duration(request.hold_ms, self._cache.limits.hold_s)
                hold = self._cache.hold(session, chain, found, duration_s)
                if hold is not None:
                    response.hold_id = hold.hold_id
                    response.hold_ms = int(duration_s * 1000)
            return response

        return await answered(context, self._refused, work())

    async def Get(  # noqa: N802
        self, request: cache_pb2.GetRequest, context: Context
    ) -> AsyncIterator[cache_pb2.GetResponse]:
        responses = streamed(context, self._refused, self._get(request, context))
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def _get(
        self, request: cache_pb2.GetRequest, context: Context
    ) -> AsyncGenerator[cache_pb2.GetResponse]:
        cache = self._cache
        session = self._sessions.find(request.session_id)
        hold = None
        if request.hold_id:
            hold = cache.leases.find_hold(session, request.hold_id)
            if hold is None:
                statuses = columns.write([EXPIRED], columns.U8)
                yield cache_pb2.GetResponse(outcome=cache_pb2.GetOutcome(statuses=statuses))
                return
        chain = hold.chain if hold is not None else self._chain(session, request.chain)
        if request.first_position > len(chain):
            raise RequestError(
                f"first_position is {request.first_position}; the chain has {len(chain)} pages"
            )
        hear(cache.conversations, chain.namespace, request)
        delivery = self._delivery(session, request)
        asked = GetPages(
            chain=chain,
            hold=hold,
            first_position=request.first_position,
            units=unit_indices(request.unit_mask, chain.layout),
            wait_pending=request.wait_pending,
            until_s=cache.deadlines.now() + requests.wait_s(request, context),
            lease_s=requests.duration(request.lease_ms, cache.limits.lease_s),
        )
        # Closed here and now, also when the caller goes away between two messages: what a get
        # pins must not wait for the garbage collector.
        async with aclosing(cache.get(session, asked)) as items:
            async for item in items:
                with closing(delivery.responses(asked, item)) as responses:
                    for response in responses:
                        yield response

    def _delivery(self, session: Session, request: cache_pb2.GetRequest) -> Delivery:
        if request.delivery == cache_pb2.DELIVERY_INLINE:
            return InlineDelivery(self._cache, session)
        if request.delivery == cache_pb2.DELIVERY_BULK:
            if self._bulk is None:
                raise Unavailable("this node serves no bulk streams")
            return BulkDelivery(self._cache)
        if request.delivery != cache_pb2.DELIVERY_GRANTS:
            raise RequestError(f"delivery is {request.delivery}, allowed: GRANTS, INLINE, BULK")
        if not session.attached:
            raise RequestError("grants need shared memory: this session never connected to it")
        return GrantDelivery(self._cache)

    async def Release(  # noqa: N802
        self, request: cache_pb2.ReleaseRequest, context: Context
    ) -> cache_pb2.ReleaseResponse:
        async def work() -> cache_pb2.ReleaseResponse:
            session = self._sessions.find(request.session_id)
            leases = self._cache.leases
            held = [
                leases.release(session, lease_id)
                for lease_id in requests.ids("lease_ids", request.lease_ids)
            ]
            held += [
                leases.release_hold(session, hold_id)
                for hold_id in requests.ids("hold_ids", request.hold_ids)
            ]
            return cache_pb2.ReleaseResponse(held=columns.write(held, columns.U8))

        return await answered(context, self._refused, work())

    async def Renew(  # noqa: N802
        self, request: cache_pb2.RenewRequest, context: Context
    ) -> cache_pb2.RenewResponse:
        async def work() -> cache_pb2.RenewResponse:
            session = self._sessions.find(request.session_id)
            cache, bounds = self._cache, self._cache.limits
            renewed: list[bool] = []
            for name, ids, renew, limit_s in (
                ("lease_ids", request.lease_ids, cache.leases.renew, bounds.lease_s),
                ("hold_ids", request.hold_ids, cache.leases.renew_hold, bounds.hold_s),
                (
                    "reservation_ids",
                    request.reservation_ids,
                    cache.reservations.renew,
                    bounds.reservation_s,
                ),
            ):
                duration_s = requests.duration(request.duration_ms, limit_s)
                renewed += [
                    renew(session, number, duration_s) for number in requests.ids(name, ids)
                ]
            return cache_pb2.RenewResponse(renewed=columns.write(renewed, columns.U8))

        return await answered(context, self._refused, work())

    async def Reserve(  # noqa: N802
        self, request: cache_pb2.ReserveRequest, context: Context
    ) -> cache_pb2.ReserveResponse:
        async def work() -> cache_pb2.ReserveResponse:
            if self._sessions.draining:
                raise Unavailable("the node is shutting down and takes no puts")
            session = self._sessions.find(request.session_id)
            chain = self._chain(session, request.chain)
            asked = requests.reserve_pages(
                request, session, chain, self._cache.limits.reservation_s
            )
            hear(self._cache.conversations, chain.namespace, request)
            reservation, statuses = self._cache.reserve(session, asked)
            response = cache_pb2.ReserveResponse(
                statuses=columns.write(statuses, columns.U8),
                unpinned_count=self._cache.pin_offered(asked),
            )
            if reservation is not None:
                response.reservation_id = reservation.reservation_id
                response.reservation_ms = int(asked.duration_s * 1000)
            return response

        return await answered(context, self._refused, work())

    async def Commit(  # noqa: N802
        self, request: cache_pb2.CommitRequest, context: Context
    ) -> cache_pb2.CommitResponse:
        async def work() -> cache_pb2.CommitResponse:
            session = self._sessions.find(request.session_id)
            reservation = self._cache.reservations.find(session, request.reservation_id)
            if reservation is None:
                rows = columns.read("positions", request.positions, columns.U32)
                statuses = np.full(len(rows), EXPIRED, dtype=np.uint8)
            else:
                ring = self._sessions.ring(session)
                filled = requests.filled_units(request, reservation, ring.size_bytes)
                statuses = await self._cache.commit(reservation, filled, ring)
                if request.last:
                    self._cache.reservations.finish(reservation)
            return cache_pb2.CommitResponse(statuses=columns.write(statuses, columns.U8))

        return await answered(context, self._refused, work())

    async def Put(  # noqa: N802
        self, request_iterator: AsyncIterator[cache_pb2.PutRequest], context: Context
    ) -> cache_pb2.PutResponse:
        work = receive_units(self._cache, self._sessions, request_iterator)
        return await answered(context, self._refused, work)

    async def Abort(  # noqa: N802
        self, request: cache_pb2.AbortRequest, context: Context
    ) -> cache_pb2.AbortResponse:
        async def work() -> cache_pb2.AbortResponse:
            session = self._sessions.find(request.session_id)
            reservation = self._cache.reservations.find(session, request.reservation_id)
            if reservation is not None:
                self._cache.reservations.end(reservation)
            return cache_pb2.AbortResponse(held=reservation is not None)

        return await answered(context, self._refused, work())

    async def Retain(  # noqa: N802
        self, request: cache_pb2.RetainRequest, context: Context
    ) -> cache_pb2.RetainResponse:
        async def work() -> cache_pb2.RetainResponse:
            session = self._sessions.find(request.session_id)
            chain, wish = self._chain(session, request.chain), retention_of(request)
            statuses = self._cache.retain(session, chain, wish, unpin=request.unpin)
            return cache_pb2.RetainResponse(statuses=columns.write(statuses, columns.U8))

        return await answered(context, self._refused, work())

    async def Hint(  # noqa: N802
        self, request: cache_pb2.HintRequest, context: Context
    ) -> cache_pb2.HintResponse:
        async def work() -> cache_pb2.HintResponse:
            session = self._sessions.find(request.session_id)
            chain = self._chain(session, request.chain)
            self._cache.conversations.tell(chain.namespace, hint_of(request.hint))
            return cache_pb2.HintResponse()

        return await answered(context, self._refused, work())

    async def Delete(  # noqa: N802
        self, request: cache_pb2.DeleteRequest, context: Context
    ) -> cache_pb2.DeleteResponse:
        async def work() -> cache_pb2.DeleteResponse:
            session = self._sessions.find(request.session_id)
            statuses = await self._cache.delete(session, self._chain(session, request.chain))
            return cache_pb2.DeleteResponse(statuses=columns.write(statuses, columns.U8))

        return await answered(context, self._refused, work())

    async def Clear(  # noqa: N802
        self, request: cache_pb2.ClearRequest, context: Context
    ) -> cache_pb2.ClearResponse:
        async def work() -> cache_pb2.ClearResponse:
            session = self._sessions.find(request.session_id)
            index = request.namespace_index
            if index >= len(session.namespaces):
                raise RequestError(
                    f"namespace_index is {index}; the session has "
                    f"{len(session.namespaces)} namespaces"
                )
            namespace = session.namespaces[index]
            layout = None
            if request.layout_fingerprint:
                layout = next(
                    (
                        entry.numbers[namespace]
                        for entry in session.layouts
                        if entry.fingerprint == request.layout_fingerprint
                    ),
                    None,
                )
                if layout is None:
                    raise RequestError("layout_fingerprint is none of the session's layouts")
            count = await self._cache.clear(namespace, layout)
            return cache_pb2.ClearResponse(page_count=count)

        return await answered(context, self._refused, work())

    async def Flush(  # noqa: N802
        self, request: cache_pb2.FlushRequest, context: Context
    ) -> cache_pb2.FlushResponse:
        async def work() -> cache_pb2.FlushResponse:
            session = self._sessions.find(request.session_id)
            answer = await self._cache.flush(session.namespaces)
            return cache_pb2.FlushResponse(
                durable_pages=answer.durable_pages, volatile_pages=answer.volatile_pages
            )

        return await answered(context, self._refused, work())
