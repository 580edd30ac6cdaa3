"""Chats about retrieved documents, as token ids.

Every session sends the same system prompt, then a document that was retrieved for it, then its
turns: what the user says, and what the engine answered. At full length that is the workload for
which rates are published: 1,500 tokens, 8,000, and six turns of 200 and 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

RESERVED_IDS: Final = 64
"""The first ids of a vocabulary are often no text but the marks of a chat: left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of each part of a conversation."""

    system_tokens: int = 1500
    document_tokens: int = 8000
    user_tokens: int = 200
    """The mean of a turn; turns are spread evenly from half of it to one and a half."""
    answer_tokens: int = 200

    def scaled(self, scale: float) -> Lengths:
        """All of them times ``scale``, at least one token each."""
        return Lengths(
            system_tokens=max(1, round(self.system_tokens * scale)),
            document_tokens=max(1, round(self.document_tokens * scale)),
            user_tokens=max(1, round(self.user_tokens * scale)),
            answer_tokens=max(1, round(self.answer_tokens * scale)),
        )


@dataclass(frozen=True, slots=True)
class Session:
    """What one user sees and says; the answers are not known before."""

    document: int
    """Which of the pool was retrieved."""
    opening: tuple[int, ...]
    """System prompt and document."""
    user_turns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions with the same number of turns each."""

    lengths: Lengths
    sessions: tuple[Session, ...]

    @property
    def turn_count(self) -> int:
        """Requests, all sessions together."""
        return sum(len(session.user_turns) for session in self.sessions)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest conversation when it has ended."""
        return max(len(session.opening) + self._turn_tokens(session) for session in self.sessions)

    @property
    def distinct_tokens(self) -> int:
        """Tokens whose KV differs when all has ended, without the rounding to blocks."""
        documents = len({session.document for session in self.sessions})
        shared = self.lengths.system_tokens + documents * self.lengths.document_tokens
        return shared + sum(self._turn_tokens(session) for session in self.sessions)

    def _turn_tokens(self, session: Session) -> int:
        said = sum(len(turn) for turn in session.user_turns)
        return said + len(session.user_turns) * self.lengths.answer_tokens


def make_workload(
    lengths: Lengths, documents: Sequence[int], turns: int, vocabulary: int, seed: int
) -> Workload:
    """A session of ``turns`` turns for each of ``documents``, in that order.

    The same arguments always make the same sessions. ``vocabulary`` is the number of token ids.
    """
    random = np.random.default_rng(seed)

    def draw(count: int) -> tuple[int, ...]:
        low = min(RESERVED_IDS, vocabulary // 2)
        return tuple(random.integers(low, vocabulary, count).tolist())

    system = draw(lengths.system_tokens)
    texts = {document: draw(lengths.document_tokens) for document in sorted(set(documents))}
    spread = lengths.user_tokens // 2
    sessions: list[Session] = []
    for document in documents:
        said = random.integers(
            lengths.user_tokens - spread, lengths.user_tokens + spread + 1, turns
        )
        sessions.append(
            Session(document, system + texts[document], tuple(draw(int(count)) for count in said))
        )
    return Workload(lengths, tuple(sessions))


def zipf_documents(sessions: int, pool: int, exponent: float, seed: int) -> tuple[int, ...]:
    """Which document of a pool each session retrieves: the n-th with weight ``n ** -exponent``."""
    weights = np.arange(1, pool + 1, dtype=np.float64) ** -exponent
    random = np.random.default_rng(seed)
    return tuple(random.choice(pool, sessions, p=weights / weights.sum()).tolist())
