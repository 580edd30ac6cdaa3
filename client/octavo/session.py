"""A session with a node: what it granted, and the transport that both sides can do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from octavo.address import Address
from octavo.deadline import Deadline
from octavo.errors import (
    ConnectError,
    InvalidRequest,
    NodeFailed,
    OctavoError,
    SessionRefused,
)
from octavo.health import HealthRecorder
from octavo.results import NodeInfo
from octavo.terms import SessionTerms
from octavo.transport.base import Transport
from octavo.transport.broker import BrokerLink
from octavo.transport.bulk import BulkTransport
from octavo.transport.bulk_socket import BulkSocket
from octavo.transport.bulk_streams import CONNECT_S
from octavo.transport.inline import InlineTransport
from octavo.transport.shm import ShmTransport
from octavo.version import __version__
from octavo.wire import Wire
from octavo_proto.layout import Layout
from octavo_proto.limits import KEY_BYTES, NAMESPACE_KEY_BYTES
from octavo_proto.v1 import cache_pb2

CLOSE_TIMEOUT_S: Final = 0.5
"""Saying goodbye is a courtesy: the node closes silent sessions by itself."""


@dataclass(slots=True)
class Session:
    """Open until ``close``. ``lost`` may be set from another thread at any time."""

    wire: Wire
    session_id: bytes
    node: NodeInfo
    namespace_keys: dict[str, bytes]
    limits: cache_pb2.Limits
    transport: Transport
    lost: bool = field(default=False)
    call_count: int = field(default=0)

    @property
    def alive(self) -> bool:
        return not self.lost and self.transport.alive

    def namespace_key(self, namespace: str) -> bytes:
        return self.namespace_keys[namespace]

    def close(self, *, goodbye: bool) -> None:
        """Gives up memory and connection. ``goodbye`` tells the node, which ends the leases."""
        self.lost = True
        if goodbye:
            request = cache_pb2.CloseSessionRequest(session_id=self.session_id)
            with suppress(OctavoError):  # gone already, or hung: either way it will notice
                self.wire.unary(self.wire.cache.CloseSession, request, Deadline(CLOSE_TIMEOUT_S))
        self.transport.close()
        self.wire.close()


def open_session(
    address: Address, terms: SessionTerms, deadline: Deadline, health: HealthRecorder
) -> Session:
    """Dials, opens a session and picks its transport.

    Raises:
        SessionRefused: a layout, namespace or credential does not agree.
        NodeUnavailable: nobody answers in time.
    """
    want_shared_memory = terms.transport == "shm" or (
        terms.transport == "auto" and address.is_local
    )
    wire = Wire(address)
    try:
        request = cache_pb2.OpenSessionRequest(
            client=f"octavo-python/{__version__}",
            namespaces=terms.namespaces,
            layouts=[layout.to_proto() for layout in terms.layouts],
            layout_fingerprints=b"".join(layout.fingerprint() for layout in terms.layouts),
            variants=terms.variants,
            want_shared_memory=want_shared_memory,
            want_bulk=terms.transport in ("auto", "bulk"),
        )
        try:
            response = wire.unary(wire.cache.OpenSession, request, deadline)
        except (InvalidRequest, NodeFailed) as error:
            # Asking again would be answered the same; a miss would hide a wrong setting.
            raise SessionRefused(f"node at {address}: {error}") from None
        _check_layouts(terms.layouts, response.layout_fingerprints)
        session = Session(
            wire=wire,
            session_id=response.session_id,
            node=NodeInfo(
                node_id=response.node_id,
                boot_id=response.boot_id,
                server=response.server,
                features=tuple(response.features),
                address=str(address),
            ),
            namespace_keys=_namespace_keys(terms.namespaces, response.namespaces),
            limits=response.limits,
            transport=InlineTransport(wire, health),
        )
        if want_shared_memory:
            _map_memory(session, response, terms, deadline, health)
        if terms.transport == "bulk" or (
            terms.transport == "auto" and session.transport.name == InlineTransport.name
        ):
            _open_bulk(session, response, terms, deadline, health)
    except BaseException:
        wire.close()
        raise
    return session


def _map_memory(
    session: Session,
    response: cache_pb2.OpenSessionResponse,
    terms: SessionTerms,
    deadline: Deadline,
    health: HealthRecorder,
) -> None:
    """Moves the session to shared memory, or leaves it inline where that is allowed."""

    def on_lost() -> None:
        session.lost = True

    try:
        if not response.HasField("shared_memory"):
            raise ConnectError("the node offers no shared memory to this session")
        link = BrokerLink(response.shared_memory, deadline.require_s())
    except ConnectError as error:
        if terms.transport == "shm":
            raise
        health.failure("shared_memory_unavailable", error)
        return
    session.transport = ShmTransport(session.wire, session.session_id, link, health, on_lost)


def _open_bulk(
    session: Session,
    response: cache_pb2.OpenSessionResponse,
    terms: SessionTerms,
    deadline: Deadline,
    health: HealthRecorder,
) -> None:
    """Moves the session to bulk streams, or leaves it inline where that is allowed."""
    required = terms.transport == "bulk"
    if not response.HasField("bulk"):
        if required:
            raise ConnectError("the node offers no bulk streams")
        return
    wire, session_id, port = session.wire, session.session_id, response.bulk
    host = port.host or wire.address.host

    def connect(timeout_s: float) -> BulkSocket:
        began = Deadline(timeout_s)
        request = cache_pb2.IssueBulkTicketRequest(session_id=session_id)
        issued = wire.unary(wire.cache.IssueBulkTicket, request, began)
        return BulkSocket(host, port.port, issued.ticket, began.require_s())

    try:
        first = BulkSocket(host, port.port, port.ticket, min(deadline.require_s(), CONNECT_S))
    except ConnectError as error:
        if required:
            raise
        health.failure("bulk_unreachable", error)
        return
    health.count("bulk_streams_opened")
    session.transport = BulkTransport(
        wire, session_id, session.limits.unit_bytes_max, connect, first, health
    )


def _check_layouts(layouts: Sequence[Layout], fingerprints: bytes) -> None:
    if fingerprints != b"".join(layout.fingerprint() for layout in layouts):
        names = [
            layout.name
            for place, layout in enumerate(layouts)
            if fingerprints[place * KEY_BYTES : (place + 1) * KEY_BYTES] != layout.fingerprint()
        ]
        raise SessionRefused(
            f"the node computes other fingerprints of layouts {', '.join(names) or 'not asked for'}"
        )


def _namespace_keys(
    wanted: Sequence[str], granted: Sequence[cache_pb2.GrantedNamespace]
) -> dict[str, bytes]:
    keys = {namespace.name: namespace.key for namespace in granted}
    for place, name in enumerate(wanted):
        if place >= len(granted) or granted[place].name != name:
            raise SessionRefused(f"the node did not grant namespace {name!r}")
        if len(keys[name]) != NAMESPACE_KEY_BYTES:
            raise SessionRefused(f"the node sent no usable key for namespace {name!r}")
    return keys
