"""Keeps one session open: connects when needed, again when lost, and not too often when in vain."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from octavo.address import Address
from octavo.breaker import Breaker
from octavo.deadline import Deadline
from octavo.errors import (
    CallCancelled,
    ClientClosed,
    ConnectError,
    NodeBusy,
    NodeTimeout,
    NodeUnavailable,
)
from octavo.health import HealthRecorder
from octavo.session import Session, open_session
from octavo.terms import SessionTerms

Answer = TypeVar("Answer")

TIMEOUTS_BEFORE_REDIAL: Final = 2
"""A single late answer does not cost the session; a second one in a row does, since a
connection can be dead without saying so."""


class Connection:
    """Shared by all threads of a client. Nothing is dialled before the first call."""

    def __init__(self, address: Address, terms: SessionTerms) -> None:
        self.address: Final = address
        self._terms = terms
        self.health: Final = HealthRecorder()
        self.breaker = Breaker()
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._closed = False
        self._owner_pid = os.getpid()
        self._timeouts_in_row = 0
        self._left_to_parent: list[Session] = []

    @property
    def session_if_open(self) -> Session | None:
        """The session, without dialling for one."""
        session = self._session
        if session is None or not session.alive or self._owner_pid != os.getpid():
            return None
        return session

    def session(self, deadline: Deadline) -> Session:
        """The open session, or a new one.

        Raises:
            ClientClosed, SessionRefused, NodeUnavailable.
        """
        session = self.session_if_open
        if session is not None and not self._closed:
            return session
        if self._owner_pid != os.getpid():
            self._leave_to_parent()
        if not self._lock.acquire(timeout=deadline.require_s()):
            raise NodeTimeout("another thread is still connecting")
        try:
            if self._closed:
                raise ClientClosed("the client is closed")
            session = self._session
            if session is not None and session.alive:
                return session
            if session is not None:
                session.close(goodbye=False)
                self._session = None
            self._session = open_session(self.address, self._terms, deadline, self.health)
            self.health.count("sessions_opened")
            return self._session
        finally:
            self._lock.release()

    def drop(self, session: Session) -> None:
        """Gives up a session that does not work any more. Calls in progress on it end."""
        with self._lock:
            if self._session is session:
                self._session = None
        session.close(goodbye=False)

    def close(self) -> None:
        if self._owner_pid != os.getpid():
            self._leave_to_parent()
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close(goodbye=session.alive)

    def attempt(self, deadline: Deadline, act: Callable[[Session, bool], Answer]) -> Answer:
        """Runs ``act(session, is_retry)``; once more on a new session if the old one is gone.

        A node that was restarted is noticed by the first call after it: that call fails on the
        old session, so it is worth its second try. A session that was opened for this call and
        fails at once is not.

        Raises:
            OctavoError: whatever the last try ended with; the breaker has been told.
        """
        is_retry = False
        while True:
            session: Session | None = None
            was_open = self.session_if_open is not None
            try:
                session = self.session(deadline)
                answer = act(session, is_retry)
            except CallCancelled:
                self.breaker.succeeded()  # says nothing about the node; must not hold the probe
                raise
            except NodeTimeout:
                self._timed_out(session)
                raise
            except ConnectError:
                if session is not None:
                    self.drop(session)
                    if was_open and not is_retry and deadline.remaining_s() > 0:
                        is_retry = True
                        self.health.count("session_reopened")
                        continue
                self.breaker.failed()
                raise
            except NodeBusy:
                self._answered()
                raise
            except NodeUnavailable:
                self.breaker.failed()
                raise
            except BaseException:
                self._answered()  # a refusal, a bad request, a sink's error: the node is there
                raise
            self._answered()
            return answer

    def _answered(self) -> None:
        self._timeouts_in_row = 0
        self.breaker.succeeded()

    def _timed_out(self, session: Session | None) -> None:
        self.breaker.failed()
        self._timeouts_in_row += 1
        if session is not None and self._timeouts_in_row >= TIMEOUTS_BEFORE_REDIAL:
            self._timeouts_in_row = 0
            self.drop(session)

    def _leave_to_parent(self) -> None:
        """After a fork: the session is the parent's, and so may be a lock that is held."""
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self.breaker = Breaker()
        if self._session is not None:
            self._session.transport.leave_to_parent()
            # gRPC would close a forgotten channel properly, and thereby the parent's.
            self._left_to_parent.append(self._session)
            self._session = None
