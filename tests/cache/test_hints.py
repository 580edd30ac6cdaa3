"""What is told of conversations: counted, and the last of each remembered, within bounds."""

from __future__ import annotations

import pytest

from octavo_server.cache import hints
from octavo_server.cache.counters import Counters
from octavo_server.cache.hints import Conversations, Hint, HintKind


def conversations(now_s: float = 5.0) -> tuple[Conversations, Counters]:
    counters = Counters()
    return Conversations(lambda: now_s, counters), counters


def test_the_last_hint_of_a_conversation_counts() -> None:
    known, counters = conversations()
    known.tell(1, Hint("a", HintKind.ONGOING))
    known.tell(1, Hint("a", HintKind.PAUSE, 30.0))
    known.tell(1, Hint("b", HintKind.TOOL_CALL))
    told = known.last(1, "a")
    assert told is not None
    assert (told.hint.kind, told.hint.pause_s, told.at_s) == (HintKind.PAUSE, 30.0, 5.0)
    assert (known.count, known.waiting_count) == (2, 2)
    known.tell(1, Hint("a", HintKind.ONGOING))
    assert known.waiting_count == 1
    counted = {kind: counters[f"hints_{kind.value}"] for kind in HintKind}
    assert list(counted.values()) == [2, 0, 1, 1]


def test_a_conversation_that_ended_is_forgotten() -> None:
    known, counters = conversations()
    known.tell(1, Hint("a", HintKind.TOOL_CALL))
    known.tell(1, Hint("a", HintKind.ENDED))
    assert known.last(1, "a") is None
    assert (known.count, known.waiting_count, counters["hints_ended"]) == (0, 0, 1)


def test_conversations_of_two_namespaces_are_two() -> None:
    known, _ = conversations()
    known.tell(1, Hint("a", HintKind.PAUSE))
    known.tell(2, Hint("a", HintKind.ENDED))
    assert known.last(1, "a") is not None


def test_what_was_silent_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "CONVERSATIONS_MAX", 3)
    known, _ = conversations()
    for name in ("a", "b", "c", "a", "d"):
        known.tell(1, Hint(name, HintKind.ONGOING))
    assert known.count == 3
    assert [name for name in "abcd" if known.last(1, name)] == ["a", "c", "d"]
