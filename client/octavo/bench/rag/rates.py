"""How much of the prompts was computed, and how much had to be.

A request's prompt has P tokens, of which an engine computes C. It cannot compute fewer than
C_min: the last token, what does not fill a block, and blocks that nobody had computed before.

    recompute rate = sum C / sum P        floor = sum C_min / sum P
    redundant = (sum C - sum C_min) / (sum P - sum C_min)      0: perfect, 1: no cache at all
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class RateError(RuntimeError):
    """An engine's figures contradict each other, or what was asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTurn:
    """A request that was answered. All times are of one clock."""

    session: int
    prompt: Sequence[int]
    answer: Sequence[int]
    cached_tokens: int
    """Tokens of the prompt that were not computed."""
    issued_s: float
    first_token_s: float
    ended_s: float

    @property
    def computed_tokens(self) -> int:
        return len(self.prompt) - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Reach:
    """Tokens at a prompt's start that could have been there when it was sent."""

    alone_tokens: int
    """If each request had been answered before the next one was sent."""
    timely_tokens: int
    """Of these, what had been computed by then. The others were being computed."""


def reaches(turns: Sequence[ServedTurn], block_tokens: int) -> list[Reach]:
    """What could be reused for each turn, in whole blocks and never the last token.

    ``turns`` are in the order in which they were sent. A prompt's KV is there from the first
    token of the answer on, that of an answer from its end on, but for its last token: no KV was
    ever made of it.
    """
    known = _Blocks(block_tokens)
    found: list[Reach] = []
    for turn in turns:
        usable = (len(turn.prompt) - 1) // block_tokens
        there_s = known.there_s(turn.prompt, usable)
        timely = sum(1 for at_s in there_s if at_s <= turn.issued_s)
        found.append(Reach(len(there_s) * block_tokens, timely * block_tokens))
        known.add(turn)
    return found


def compulsory_tokens(turn: ServedTurn, reach: Reach) -> int:
    """C_min of a turn that computed what it did.

    Blocks that another request was computing when this one was sent count as compulsory if this
    one computed them too, and as reused if it did not.

    Raises:
        RateError: it is said to have computed less than is possible.
    """
    if turn.cached_tokens > reach.alone_tokens:
        raise RateError(
            f"a prompt of {len(turn.prompt)} tokens is said to have had {turn.cached_tokens} "
            f"cached, and only {reach.alone_tokens} had been seen before"
        )
    return len(turn.prompt) - max(reach.timely_tokens, turn.cached_tokens)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens of all prompts together."""

    prompt_tokens: int
    computed_tokens: int
    compulsory_tokens: int
    alone_tokens: int
    """Compulsory if each request had been answered before the next one was sent."""

    @property
    def recompute_rate(self) -> float:
        return self.computed_tokens / self.prompt_tokens

    @property
    def floor(self) -> float:
        return self.compulsory_tokens / self.prompt_tokens

    @property
    def floor_alone(self) -> float:
        """The floor without concession to requests that ran at the same time."""
        return self.alone_tokens / self.prompt_tokens

    @property
    def redundant(self) -> float:
        """0 where there was nothing that could have been reused."""
        avoidable = self.prompt_tokens - self.compulsory_tokens
        wasted = self.computed_tokens - self.compulsory_tokens
        return wasted / avoidable if avoidable else 0.0


def rates(turns: Sequence[ServedTurn], block_tokens: int, failed_tokens: int = 0) -> Rates:
    """The rates of turns in the order in which they were sent.

    ``failed_tokens`` were reported as cached, did not come, and were computed after all.

    Raises:
        RateError: a turn is said to have computed less than is possible.
    """
    found = reaches(turns, block_tokens)
    pairs = list(zip(turns, found, strict=True))
    return Rates(
        prompt_tokens=sum(len(turn.prompt) for turn in turns),
        computed_tokens=sum(turn.computed_tokens for turn in turns) + failed_tokens,
        compulsory_tokens=sum(compulsory_tokens(turn, reach) for turn, reach in pairs),
        alone_tokens=sum(len(turn.prompt) - reach.alone_tokens for turn, reach in pairs),
    )


@dataclass(slots=True)
class _Block:
    """A block after all those before it."""

    there_s: float
    """When the first who computed it had done so."""
    next: dict[bytes, _Block] = field(default_factory=dict[bytes, "_Block"])


class _Blocks:
    """The blocks that somebody computed or is computing, as a tree."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._root = _Block(0.0)

    def there_s(self, prompt: Sequence[int], block_count: int) -> list[float]:
        """Since when the known ones of the prompt's first blocks are there."""
        found: list[float] = []
        block = self._root
        for content in self._contents(prompt, block_count):
            if content not in block.next:
                break
            block = block.next[content]
            found.append(block.there_s)
        return found

    def add(self, turn: ServedTurn) -> None:
        tokens = [*turn.prompt, *turn.answer[:-1]]
        prompt_blocks = len(turn.prompt) // self._block_tokens
        block = self._root
        contents = self._contents(tokens, len(tokens) // self._block_tokens)
        for place, content in enumerate(contents):
            there_s = turn.first_token_s if place < prompt_blocks else turn.ended_s
            block = block.next.setdefault(content, _Block(there_s))
            block.there_s = min(block.there_s, there_s)

    def _contents(self, tokens: Sequence[int], block_count: int) -> list[bytes]:
        size = self._block_tokens
        content = array("I", tokens[: block_count * size])
        return [content[begin : begin + size].tobytes() for begin in range(0, len(content), size)]


def percentile_ms(times_s: Sequence[float], percent: float) -> float:
    """A percentile in milliseconds, interpolated between two measurements."""
    return float(np.percentile(np.array(times_s), percent) * 1e3)
