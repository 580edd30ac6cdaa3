"""One step of a transformers model over a cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch


def next_logits(model: Any, token_ids: Sequence[int], cache: Any) -> torch.Tensor:
    """Runs tokens that follow what ``cache`` holds, and appends their KV to it.

    Returns:
        Logits of the token after the last one, shape [vocabulary].
    """
    return following_logits(model, torch.tensor(list(token_ids)), cache, logits_to_keep=1)[-1]


def following_logits(
    model: Any, tokens: torch.Tensor, cache: Any, *, logits_to_keep: int = 0
) -> torch.Tensor:
    """Like ``next_logits``, for tokens ``[count]``.

    Returns:
        Logits of the token after each of the last ``logits_to_keep`` tokens, or after each of
        all if that is 0; shape [kept, vocabulary].
    """
    with torch.inference_mode():
        output = model(
            tokens[None].to(model.device),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{_cache_argument(model): cache},
        )
    logits: torch.Tensor = output.logits
    return logits[0]


def _cache_argument(model: Any) -> str:
    """transformers 5 renamed the argument that carries the cache. Costs 20 us a step."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
