"""What applications tell about their conversations: counted, and the last of each remembered.

Nothing is evicted or loaded by it yet. A conversation is an application's own name for many
requests of one user; it has nothing to do with the sessions of the protocol.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from octavo_server.cache.counters import Counters

CONVERSATIONS_MAX: Final = 16_384
"""Remembered ones; beyond them the one that was silent for longest is forgotten. About 500
bytes each."""


class HintKind(Enum):
    """What is told. Values end the names of counters."""

    ONGOING = "ongoing"
    ENDED = "ended"
    PAUSE = "pause"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Hint:
    """``pause_s``: of a pause, for about how long."""

    conversation: str
    kind: HintKind
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """The last hint of a conversation, and when it came, on the clock of the deadlines."""

    hint: Hint
    at_s: float


class Conversations:
    """The last hint of each conversation that has not ended."""

    def __init__(self, now: Callable[[], float], counters: Counters) -> None:
        self._now = now
        self._counters = counters
        self._last: OrderedDict[tuple[int, str], Told] = OrderedDict()

    def tell(self, namespace: int, hint: Hint) -> None:
        """A hint came."""
        self._counters.add(f"hints_{hint.kind.value}")
        name = (namespace, hint.conversation)
        self._last.pop(name, None)
        if hint.kind is not HintKind.ENDED:
            self._last[name] = Told(hint, self._now())
            if len(self._last) > CONVERSATIONS_MAX:
                self._last.popitem(last=False)

    def last(self, namespace: int, conversation: str) -> Told | None:
        """What was told last of a conversation; None if it ended, or nothing is known."""
        return self._last.get((namespace, conversation))

    @property
    def count(self) -> int:
        """Conversations that are known and have not ended."""
        return len(self._last)

    @property
    def waiting_count(self) -> int:
        """Of these, those that pause or wait for a tool."""
        waiting = (HintKind.PAUSE, HintKind.TOOL_CALL)
        return sum(told.hint.kind in waiting for told in self._last.values())
