"""What the demo and its workers say to each other: JSON, a line each.

A worker reads one ``WorkerTask``, and writes a ``TurnReport`` a turn and a ``WorkerEnd``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

RAW_CODEC: Final = "raw"
"""Bits as the model has them: the one whose answers must be equal."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A worker's task; it gets one, on stdin."""

    checkpoint: str
    questions: tuple[str, ...]
    history: tuple[int, ...] = ()
    """Token ids of the conversation so far, the last answer's end included."""
    address: str | None = None
    """The node; None to do without Octavo."""
    forget_each_turn: bool = False
    """Compute every turn from nothing, as a worker without any cache would."""
    codecs: tuple[str, ...] = ()
    """Answer the one question once for each of these, from pages packed by it."""
    new_tokens_max: int = 40
    thread_count: int = 1


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One turn as a worker saw it."""

    question: str
    answer: str
    answer_tokens: tuple[int, ...]
    prompt_tokens: int
    computed_tokens: int
    """Of the prompt: run through the model in this turn."""
    loaded_tokens: int
    """Of the prompt: taken from the node in this turn. The rest was in the worker already."""
    ttft_s: float
    """From the prompt's token ids to the first new token, match, get and scatter included."""
    load_s: float
    """The part of it that was spent on match, get and scatter."""
    loaded_bytes: int = 0
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict[str, int])
    """Where the match found what was loaded."""
    get_statuses: Mapping[str, int] = field(default_factory=dict[str, int])
    put_statuses: Mapping[str, int] = field(default_factory=dict[str, int])
    codec: str = RAW_CODEC
    """What packed the pages that were loaded."""
    stored_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """A task with codecs: what the prompt's pages take in each tier."""
    margin: float = 0.0
    """Smallest lead in logits of a chosen token over the runner-up."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """What a worker leaves behind."""

    history: tuple[int, ...]
    held_tokens: int
    """Tokens whose KV it had in the end."""
    transport: str
    """How it reached the node; empty without Octavo."""


Message = WorkerTask | TurnReport | WorkerEnd

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (WorkerTask, TurnReport, WorkerEnd)
}

_TUPLES: Final = frozenset({"questions", "history", "codecs", "answer_tokens"})
"""Fields that JSON turns into lists."""


def to_line(message: Message) -> str:
    """One line, its newline included."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}) + "\n"


def from_line(line: str) -> Message:
    """The message of a line.

    Raises:
        ValueError: the line is none of ours.
    """
    values: dict[str, Any] = json.loads(line)
    kind = _KINDS.get(values.pop("kind", ""))
    if kind is None:
        raise ValueError(f"no message of the demo: {line[:80]!r}")
    arguments: dict[str, Any] = {
        name: tuple(value) if name in _TUPLES else value for name, value in values.items()
    }
    return kind(**arguments)
