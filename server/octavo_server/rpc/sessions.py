"""Open sessions: their names, their tickets for shared memory, and their ends."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from octavo_proto import columns, limits
from octavo_proto.layout import Layout
from octavo_proto.v1 import cache_pb2
from octavo_server.bulk.tickets import Tickets
from octavo_server.cache.deadlines import Deadline
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.session import Session, SessionLayout
from octavo_server.errors import (
    LimitReached,
    RequestError,
    SessionRefusedError,
    SessionUnknown,
    Unavailable,
)
from octavo_server.store.arena import StagingRing

_log = logging.getLogger(__name__)

DEFAULT_NAMESPACE: Final = "default"


@dataclass(slots=True, eq=False)
class _Open:
    """A session and what the RPC layer keeps for it."""

    session: Session
    idle: Deadline
    ring: StagingRing | None = None
    hang_up: Callable[[], None] | None = None


class Sessions:
    """All open sessions of a node."""

    def __init__(
        self,
        cache: PageCache,
        namespace_key: Callable[[str], bytes],
        *,
        sessions_max: int,
        idle_s: float,
        ring_bytes: int,
    ) -> None:
        self._cache: Final = cache
        self._namespace_key: Final = namespace_key
        self._sessions_max: Final = sessions_max
        self.idle_s: Final = idle_s
        self.ring_bytes: Final = ring_bytes
        self._open: dict[bytes, _Open] = {}
        self._tickets: Final = Tickets(cache.deadlines)
        self.draining = False
        self.on_close: Callable[[Session], None] = lambda _session: None
        """Called with each session that has ended."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def attached_count(self) -> int:
        """Sessions whose worker has the node's memory mapped."""
        return sum(entry.session.attached for entry in self._open.values())

    async def open(
        self, request: cache_pb2.OpenSessionRequest
    ) -> tuple[Session, list[cache_pb2.GrantedNamespace]]:
        """A new session and the namespaces it was granted.

        Raises:
            RequestError, LayoutError, ColumnError: the request is malformed.
            SessionRefusedError: a layout is not what the node, or its name, says it is.
            LimitReached: the node has as many sessions as it may have.
        """
        if self.draining:
            raise Unavailable("the node is shutting down and opens no sessions")
        self._check_room()
        names = list(request.namespaces) or [DEFAULT_NAMESPACE]
        layouts = _read_layouts(request, names)
        variants = _read_variants(request.variants)
        registry = self._cache.registry
        namespaces = [await registry.namespace(name) for name in names]
        known = [
            [await registry.layout(namespace, layout) for layout in layouts]
            for namespace in namespaces
        ]
        entries = tuple(
            SessionLayout(
                numbers={ns: row[i].number for ns, row in zip(namespaces, known, strict=True)},
                layout=layout,
                fingerprint=known[0][i].fingerprint,
            )
            for i, layout in enumerate(layouts)
        )
        # Asked again: others may have opened theirs while new names were made durable.
        self._check_room()
        session = Session(
            session_id=secrets.token_bytes(limits.KEY_BYTES),
            client=request.client[: limits.NAME_BYTES_MAX],
            namespaces=tuple(namespaces),
            layouts=entries,
            variants=variants,
        )
        idle = self._cache.deadlines.after(self.idle_s, lambda: self._idled(session.session_id))
        self._open[session.session_id] = _Open(session, idle)
        self._cache.counters.add("sessions_opened")
        return session, [
            cache_pb2.GrantedNamespace(name=name, key=self._namespace_key(name)) for name in names
        ]

    def _check_room(self) -> None:
        if len(self._open) >= self._sessions_max:
            raise LimitReached(f"the node has {len(self._open)} sessions, the limit")

    def find(self, session_id: bytes) -> Session:
        """The session of that name. Raises SessionUnknown."""
        return self._find(session_id).session

    def keep(self, session: Session) -> None:
        """It is in use: its silence begins anew. Harmless if it has ended."""
        entry = self._open.get(session.session_id)
        if entry is not None and not session.attached:
            entry.idle.move(self._cache.deadlines.now() + self.idle_s)

    def ring(self, session: Session) -> StagingRing:
        """The session's staging ring. Raises RequestError where it has none."""
        ring = self._find(session.session_id).ring
        if ring is None:
            raise RequestError("the session has no staging ring: it never connected to the broker")
        return ring

    def issue_ticket(self, session: Session) -> bytes:
        """Entitles whoever shows it to the broker, once and soon, to the session's memory."""
        return self._tickets.issue(session)

    def attach(
        self, ticket: bytes, hang_up: Callable[[], None]
    ) -> tuple[Session, StagingRing] | None:
        """Redeems a ticket: the session and a ring made for it. None for any other ticket.

        From now on the session lasts as long as the connection that showed it.
        """
        session = self._tickets.redeem(ticket)
        if session is None:
            return None
        entry = self._open[session.session_id]
        entry.ring = StagingRing(self.ring_bytes)
        entry.hang_up = hang_up
        session.attached = True
        entry.idle.cancel()
        return session, entry.ring

    def close(self, session_id: bytes) -> None:
        """Ends a session and all that it holds. Unknown ones are closed already."""
        entry = self._open.pop(session_id, None)
        if entry is None:
            return
        entry.idle.cancel()
        self._cache.end_session(entry.session)
        if entry.ring is not None:
            entry.ring.close()
        if entry.hang_up is not None:
            entry.hang_up()
        self.on_close(entry.session)
        self._cache.counters.add("sessions_closed")

    def close_all(self) -> None:
        """Ends every session."""
        for session_id in tuple(self._open):
            self.close(session_id)

    def _find(self, session_id: bytes) -> _Open:
        entry = self._open.get(session_id)
        if entry is None:
            raise SessionUnknown("unknown session: it was closed or ran out, or the node restarted")
        self.keep(entry.session)
        return entry

    def _idled(self, session_id: bytes) -> None:
        _log.info("session %s was silent for too long and is closed", session_id.hex()[:8])
        self.close(session_id)


def _read_layouts(request: cache_pb2.OpenSessionRequest, names: Sequence[str]) -> list[Layout]:
    if len(names) > limits.NAMESPACES_PER_SESSION_MAX:
        raise RequestError(
            f"namespaces has {len(names)} names, at most {limits.NAMESPACES_PER_SESSION_MAX}"
        )
    for name in names:
        if not name or len(name.encode()) > limits.NAME_BYTES_MAX or not name.isprintable():
            raise RequestError(f"namespaces: {name[:64]!r} is no name of 1 to 256 printable bytes")
    if len(set(names)) != len(names):
        raise RequestError("namespaces has a name twice")
    if len(request.layouts) > limits.LAYOUTS_PER_SESSION_MAX:
        raise RequestError(
            f"layouts has {len(request.layouts)} entries, at most {limits.LAYOUTS_PER_SESSION_MAX}"
        )
    layouts = [Layout.from_proto(message) for message in request.layouts]
    stated = columns.read_keys(
        "layout_fingerprints", request.layout_fingerprints, limits.LAYOUTS_PER_SESSION_MAX
    )
    if len(stated) not in (0, len(layouts)):
        raise RequestError(f"layout_fingerprints has {len(stated)} rows for {len(layouts)} layouts")
    for layout, fingerprint in zip(layouts, stated, strict=False):
        if layout.fingerprint() != fingerprint.tobytes():
            raise SessionRefusedError(
                f"layout {layout.name!r}: this client computes fingerprint "
                f"{fingerprint.tobytes().hex()}, the node {layout.fingerprint().hex()} from the "
                "same fields: their versions hash differently, and no page would ever match"
            )
    return layouts


def _read_variants(variants: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint16]] | None:
    if not variants:
        return None
    if len(variants) > limits.VARIANTS_MAX:
        raise RequestError(f"variants has {len(variants)} entries, at most {limits.VARIANTS_MAX}")
    for variant in variants:
        if not 0 < variant < 2**16:
            raise RequestError(f"variants: {variant} is not from 1 to 65535")
    return np.array(sorted(set(variants)), dtype=np.uint16)
