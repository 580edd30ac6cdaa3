"""What tests ask of an engine's process, and what it answers. Both sides import this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """A greedy request; it goes on for ``max_tokens`` tokens whatever they are."""

    token_ids: list[int]
    max_tokens: int = 16
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    abort_once: str | None = None
    """A path: the request is aborted as soon as there is a file."""
    adapter: str | None = None
    """Folder of a LoRA adapter; the engine needs ``enable_lora``."""
    session_id: str | None = None
    hinted: dict[str, Any] | None = None
    """What an action in ``kv_hints`` says to Octavo; new in vLLM 0.32."""


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    cached_token_count: int
    """Prompt tokens that were not computed, whether the engine or the node had them."""

    ttft_s: float | None
    """From the request's arrival to its first token; None without tokens."""

    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None = None
    """What a producer hands on."""


@dataclass(frozen=True)
class Answers:
    """In the order of the requests, which arrive all at once."""

    answers: list[Answer]
    duration_s: float
    most_at_once: int
    """Requests that got a token in the same step, at most."""

    step_tokens_max: int | None
    """Tokens of all requests that a step computed, at most; None unless in-process."""

    @property
    def token_ids(self) -> list[list[int]]:
        return [each.token_ids for each in self.answers]

    @property
    def cached_token_counts(self) -> list[int]:
        return [each.cached_token_count for each in self.answers]
