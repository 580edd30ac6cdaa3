"""Greedy decoding over one cache that grows turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.transformers import next_logits

WARM_UP_TOKENS = 32
"""The first step of a process allocates and compiles; no worker is timed on that."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model and its tokenizer. Their classes differ by family, hence ``Any``."""

    model: Any
    tokenizer: Any


def open_checkpoint(folder: Path, *, thread_count: int) -> Checkpoint:
    """Loads a checkpoint in float32 and runs one warm-up step."""
    torch.set_num_threads(thread_count)
    hf: Any = transformers
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    next_logits(model, [1] * WARM_UP_TOKENS, empty_cache(model))
    return Checkpoint(model, tokenizer)


def empty_cache(model: Any) -> Any:
    """A ``DynamicCache`` for ``model``."""
    hf: Any = transformers
    return hf.DynamicCache(config=model.config)


class Decoder:
    """Chooses the likeliest token again and again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.cache: Any = empty_cache(model)

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV lies in the cache."""
        return int(self.cache.get_seq_length())

    def forget(self) -> None:
        """Starts again with an empty cache."""
        self.cache = empty_cache(self._model)

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Computes what the cache lacks of ``prompt``; logits of the token behind it."""
        return next_logits(self._model, prompt[self.held_tokens :], self.cache)

    def choose(self, logits: torch.Tensor) -> int:
        """The likeliest token."""
        return int(logits.argmax())

    def continue_from(
        self, logits: torch.Tensor, first_token: int, *, end_token: int, count_max: int
    ) -> tuple[list[int], float]:
        """The answer that begins with ``first_token``, and its smallest margin."""
        tokens, margin = [first_token], lead(logits)
        while tokens[-1] != end_token and len(tokens) < count_max:
            logits = next_logits(self._model, tokens[-1:], self.cache)
            tokens.append(self.choose(logits))
            margin = min(margin, lead(logits))
        return tokens, margin


def lead(logits: torch.Tensor) -> float:
    """How far the likeliest token is ahead of the next."""
    best_two = logits.topk(2).values
    return float(best_two[0] - best_two[1])
