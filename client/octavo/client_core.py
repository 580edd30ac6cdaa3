"""What every client has whatever it asks: terms, a connection, chains, and what a miss is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self, TypeVar

from octavo.address import default_address, parse_address
from octavo.calls import chain_message
from octavo.chain import AnyChain, Chain, ForeignChain
from octavo.connection import Connection
from octavo.deadline import Deadline
from octavo.errors import InvalidRequest, NodeBusy, NodeTimeout, NodeUnavailable
from octavo.health import Health
from octavo.results import NodeInfo
from octavo.session import Session
from octavo.terms import TransportChoice, checked_profiles, checked_terms
from octavo_proto.layout import Layout
from octavo_proto.v1 import cache_pb2

Answer = TypeVar("Answer")

TIMEOUT_S: Final = 5.0


class ClientCore:
    """Terms, connection and chains of a client; `Client` adds the calls."""

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
        """``shm``, ``bulk`` or ``grpc``, while a session is open."""
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
