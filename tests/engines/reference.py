"""Prompts, and what the tiny model answers to them when no connector is there."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.engines.jobs import Request
from tests.engines.tiny_model import VOCABULARY_SIZE
from tests.engines.vllm_engine import VllmEngine

RESERVED_TOKEN_COUNT = 3


def prompt(seed: int, token_count: int) -> list[int]:
    """Token ids that no other seed's prompt begins with; a shorter one is a prefix of it."""
    drawn = random.Random(seed)
    return [drawn.randrange(RESERVED_TOKEN_COUNT, VOCABULARY_SIZE) for _ in range(token_count)]


class Reference:
    """Asks an engine without connector, once for each request."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def token_ids(self, requests: Sequence[Request]) -> list[list[int]]:
        """Token ids for each request, from prompts that were computed wholly and alone."""
        for request in requests:
            name = (tuple(request.token_ids), request.max_tokens)
            if name not in self._known:
                self._engine.reset_prefix_cache()
                alone = Request(request.token_ids, request.max_tokens)
                self._known[name] = self._engine.generate([alone]).token_ids[0]
        return [self._known[tuple(each.token_ids), each.max_tokens] for each in requests]
