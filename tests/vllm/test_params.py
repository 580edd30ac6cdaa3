"""What requests say about their pages and sessions, in either of vLLM's ways."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.vllm.params import BadParams, RequestParams, Retention
from octavo.wishes import SessionHint

NAMESPACES = ("default", "b")


def parse(stated: Any = None, session_id: str | None = None, *actions: Any) -> RequestParams:
    params = None if stated is None else {"octavo": stated}
    hints = SimpleNamespace(actions=list(actions)) if actions else None
    return RequestParams.parse(params, NAMESPACES, session_id, hints)


def action(payload: Any, kind: str = "octavo", version: str = "1") -> SimpleNamespace:
    """As ``vllm.v1.kv_hints.KvHintAction``."""
    return SimpleNamespace(action_id="1", action_type=kind, action_version=version, payload=payload)


def test_a_time_to_live_and_a_pin_are_numbers_of_seconds() -> None:
    assert parse({"ttl_s": 600, "pin_s": 0.5}).retention == Retention(600, 0.5)
    assert not parse({}).retention


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ({"ended": True}, SessionHint("s", ended=True)),
        ({"pause_s": 20}, SessionHint("s", pause_s=20)),
        ({"tool_call": True}, SessionHint("s", tool_call=True)),
        ({"ended": False}, None),
        ({}, None),
    ],
)
def test_what_becomes_of_a_session_is_told_of_the_one_that_is_named(
    said: dict[str, Any], hint: SessionHint | None
) -> None:
    for params in (
        parse({"session": {"id": "s", **said}}),
        parse({"session": {"id": "s", **said}}, "engine's"),
        parse({"session": said}, "s"),
        parse(None, "s", action({"session": said})),
    ):
        assert (params.conversation, params.afterwards) == ("s", hint)


def test_vllms_session_id_alone_names_a_conversation() -> None:
    assert parse(None, "s") == RequestParams(conversation="s")
    assert parse(None, "") == RequestParams()


@pytest.mark.parametrize("session_id", ["x" * 300, "\ud800", "a\nb"])
def test_a_session_id_that_is_no_short_text_is_told_as_its_digest(session_id: str) -> None:
    told = parse(None, session_id).conversation
    assert told is not None
    assert len(told) == 32
    assert told == parse(None, session_id).conversation
    assert told != parse(None, session_id + "x").conversation


def test_hints_say_the_same_as_parameters_which_win() -> None:
    said = {"namespace": "b", "ttl_s": 60, "session": {"id": "s", "tool_call": True}}
    assert parse(None, None, action(said)) == parse(said)
    both = parse({"ttl_s": 5}, None, action(said))
    assert both.retention == Retention(ttl_s=5)
    assert both.namespace == "b"
    others = (action({"x": 1}, kind="prefetch"), action({"pin_s": 9}))
    assert parse(None, None, *others).retention == Retention(pin_s=9)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"ttl": 3}, "unknown 'ttl'; known are namespace, load, store, tokens, ttl_s, pin_s"),
        ({"ttl_s": "3"}, "ttl_s is '3', must be int or float"),
        ({"pin_s": True}, "pin_s is True, must be int or float"),
        ({"ttl_s": 0}, "ttl_s is 0"),
        ({"ttl_s": -5}, "ttl_s is -5"),
        ({"ttl_s": math.nan}, "ttl_s is nan"),
        ({"ttl_s": 1e12}, "up to 31622400"),
        ({"pin_s": 86_401}, "up to 86400"),
        ({"session": "s"}, "session is 's', must be dict"),
        ({"session": {"id": "s", "paused": 3}}, "unknown 'session.paused'"),
        ({"session": {"id": 3}}, "session.id is 3"),
        ({"session": {"id": ""}}, "conversation has 0 bytes"),
        ({"session": {"id": "x" * 257}}, "conversation has 257 bytes"),
        ({"session": {"id": "s", "pause_s": -1}}, "pause_s is -1"),
        ({"session": {"id": "s", "ended": True, "tool_call": True}}, "one of ended"),
        ({"session": {"ended": True}}, "names no id"),
    ],
)
def test_senseless_wishes_are_refused_by_name(stated: Any, words: str) -> None:
    with pytest.raises(BadParams, match=words):
        parse(stated)
    with pytest.raises(BadParams, match=words):
        parse(None, None, action(stated))


def test_a_version_of_hints_that_nobody_knows_is_not_guessed_at() -> None:
    with pytest.raises(BadParams, match=r"version '2'.*known is 1"):
        parse(None, None, action({"ttl_s": 5}, version="2"))
    with pytest.raises(BadParams, match="payload is list"):
        parse(None, None, action([]))
