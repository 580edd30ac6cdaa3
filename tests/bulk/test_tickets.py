"""Tickets for bulk streams: good once, soon, and for one session."""

from __future__ import annotations

import secrets

import pytest
from tests.cache.clock import Clock

from octavo_proto.limits import BULK_STREAMS_MAX
from octavo_server.bulk.tickets import TICKET_S, Tickets
from octavo_server.cache.deadlines import Deadlines
from octavo_server.cache.session import Session
from octavo_server.errors import LimitReached


def session_of(client: str = "tests") -> Session:
    return Session(secrets.token_bytes(16), client, (), (), None)


def test_a_ticket_is_good_once() -> None:
    tickets, session = Tickets(Deadlines(Clock())), session_of()
    ticket = tickets.issue(session)
    assert tickets.redeem(ticket) is session
    assert tickets.redeem(ticket) is None
    assert len(tickets) == 0


def test_a_ticket_runs_out() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    tickets = Tickets(deadlines)
    ticket = tickets.issue(session_of())
    clock.now_s += TICKET_S
    deadlines.run_due()
    assert tickets.redeem(ticket) is None
    assert len(tickets) == 0


def test_a_ticket_ends_with_its_session() -> None:
    tickets, session = Tickets(Deadlines(Clock())), session_of()
    ticket = tickets.issue(session)
    session.closed = True
    assert tickets.redeem(ticket) is None


def test_a_ticket_speaks_for_the_session_that_was_given_it() -> None:
    tickets = Tickets(Deadlines(Clock()))
    sessions = [session_of(str(number)) for number in range(3)]
    issued = [tickets.issue(session) for session in sessions]
    assert len(set(issued)) == 3
    assert [tickets.redeem(ticket) for ticket in reversed(issued)] == sessions[::-1]


def test_a_session_has_no_more_tickets_out_than_it_may_have_streams() -> None:
    tickets, session = Tickets(Deadlines(Clock())), session_of()
    issued = [tickets.issue(session) for _ in range(BULK_STREAMS_MAX)]
    with pytest.raises(LimitReached):
        tickets.issue(session)
    assert tickets.issue(session_of("another"))
    assert tickets.redeem(issued[0]) is session
    assert tickets.issue(session)


def test_a_thousand_guesses_open_nothing() -> None:
    tickets, session = Tickets(Deadlines(Clock())), session_of()
    ticket = tickets.issue(session)
    assert not any(tickets.redeem(secrets.token_bytes(16)) for _ in range(1000))
    assert tickets.redeem(ticket) is session
