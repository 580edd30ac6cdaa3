"""What a benchmark asks of an engine's process, and what it answers. Both sides import this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy request; it goes on for ``max_tokens`` tokens whatever they are."""

    token_ids: Sequence[int]
    max_tokens: int = 1
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request. Times count from when it was submitted, in this process."""

    token_ids: list[int]
    cached_token_count: int
    """Prompt tokens that were not computed, whether the engine or the node had them."""

    ttft_s: float
    duration_s: float
