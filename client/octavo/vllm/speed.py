"""How fast this engine computes prompts and this node delivers pages, as measured.

Loading is worth it where it is estimated to end sooner than computing would.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

PREFILL_TOKENS_MIN: Final = 64
"""Steps with fewer tokens are decoding: their time says nothing about prompts."""

LOAD_BYTES_MIN: Final = 1 << 20
"""Smaller loads measure the calls, not the copying."""

MEASURED: Final = 8
"""Measurements that an estimate is the median of."""

CALL_S: Final = 0.003
"""Of a load of any size: two steps of the engine and the calls in between."""

SLACK_S: Final = 0.5
"""Of a load's deadline: a node that pauses for garbage, disk or neighbours is not gone."""

STEPS_MAX: Final = 16
"""Steps in flight at once; more than any engine pipelines."""


class PrefillSpeed:
    """Tokens a second of the engine's steps. Fed by the scheduler's thread alone.

    The median of the last few: where steps overlap, one in between that computes nothing can
    be taken for another.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[int, float]] = deque(maxlen=STEPS_MAX)
        self._measured: deque[float] = deque(maxlen=MEASURED)

    @property
    def tokens_per_s(self) -> float | None:
        """None until a step with a prompt was measured."""
        return median(self._measured) if self._measured else None

    def step_started(self, token_count: int, now_s: float) -> None:
        """A step that computes was scheduled."""
        self._started.append((token_count, now_s))

    def step_ended(self, now_s: float) -> None:
        """The oldest step that has not ended did."""
        if not self._started:
            return
        token_count, started_s = self._started.popleft()
        if token_count >= PREFILL_TOKENS_MIN and now_s > started_s:
            self._measured.append(token_count / (now_s - started_s))


class LoadSpeed:
    """Bytes a second of the workers' loads: the median of the last few."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=MEASURED)

    @property
    def bytes_per_s(self) -> float | None:
        """None until a load was measured."""
        return median(self._measured) if self._measured else None

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A load ended."""
        if size_bytes >= LOAD_BYTES_MIN and seconds > 0:
            self._measured.append(size_bytes / seconds)


def is_worth_loading(
    token_count: int,
    size_bytes: int,
    ready_s: float,
    tokens_per_s: float | None,
    bytes_per_s: float | None,
) -> bool:
    """Whether loading ``token_count`` tokens ends sooner than computing them.

    ``ready_s`` is the node's estimate of when its pages could be read. What was not measured
    yet is taken to be fast enough: the load is what measures it.
    """
    if tokens_per_s is None:
        return True
    copy_s = 0.0 if bytes_per_s is None else size_bytes / bytes_per_s
    return CALL_S + ready_s + copy_s < token_count / tokens_per_s


def load_timeout_s(
    token_count: int,
    size_bytes: int,
    ready_s: float,
    tokens_per_s: float | None,
    bytes_per_s: float | None,
) -> float:
    """After how long a load is no longer worth waiting for: twice what it or computing its
    tokens should take, whichever is more, and some slack; infinity while nothing was measured."""
    if tokens_per_s is None or bytes_per_s is None:
        return math.inf
    return SLACK_S + 2 * max(ready_s + size_bytes / bytes_per_s, token_count / tokens_per_s)
