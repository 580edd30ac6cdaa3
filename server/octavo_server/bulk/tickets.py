"""One-time tickets: whoever shows one speaks for the session that was given it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from octavo_proto.limits import BULK_STREAMS_MAX, KEY_BYTES
from octavo_proto.v1 import cache_pb2
from octavo_server.cache.deadlines import Deadlines
from octavo_server.cache.session import Session
from octavo_server.errors import LimitReached

TICKET_S: Final = 10.0
"""A worker connects right after it was given a ticket, or never."""


@dataclass(frozen=True, slots=True)
class BulkPort:
    """Where streams of this node go, and what lets them in."""

    host: str
    """Empty: whatever host the worker reached the node at."""
    port: int
    tickets: Tickets

    def offer(self, session: Session) -> cache_pb2.BulkPort:
        """What a new session is told."""
        return cache_pb2.BulkPort(
            host=self.host,
            port=self.port,
            ticket=self.tickets.issue(session),
            streams_max=BULK_STREAMS_MAX,
        )


class Tickets:
    """Tickets that are out. Each is good once, for a few seconds, while its session lives."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines: Final = deadlines
        self._out: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._out)

    def issue(self, session: Session) -> bytes:
        """A new ticket, unguessable.

        Raises:
            LimitReached: the session has as many out as it may have streams.
        """
        held = sum(owner is session for owner in self._out.values())
        if held >= BULK_STREAMS_MAX:
            raise LimitReached(f"the session has {held} tickets that it did not use")
        ticket = secrets.token_bytes(KEY_BYTES)
        self._out[ticket] = session
        self._deadlines.after(TICKET_S, lambda: self._forget(ticket))
        return ticket

    def redeem(self, ticket: bytes) -> Session | None:
        """The ticket's session; None where it was used before, ran out or never existed, or
        its session is over."""
        session = self._out.pop(ticket, None)
        return None if session is None or session.closed else session

    def _forget(self, ticket: bytes) -> None:
        self._out.pop(ticket, None)
