"""Where an engine says that its prompts' tokens came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.bench.rag.rates import RateError, ServedTurn

Metrics = Mapping[str, float]
"""vLLM's counters by name, a ``source`` label behind a slash."""

_BY_SOURCE: Final = "vllm:prompt_tokens_by_source/"
_BY_TIER: Final = "vllm:prompt_tokens_cached_by_source/"
_CONNECTOR: Final = "vllm:octavo_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Tokens of prompts by where they came from."""

    engine: int
    """The engine's own prefix cache."""
    memory: int
    nvme: int
    other_tier: int
    """From a node, where this version of vLLM does not say from which tier."""
    computed: int
    failed: int
    """Announced by a node and not delivered; part of ``computed``."""


def read_sources(
    before: Metrics, after: Metrics, turns: Sequence[ServedTurn], page_tokens: int
) -> Sources:
    """What the counters say of ``turns``, which were all that ran between two readings.

    The engine counts tokens that a load did not deliver as hits. The connector says how many
    pages of ``page_tokens`` tokens these were; here they count as computed.

    Raises:
        RateError: the counters contradict the answers, or the engine computed things twice that
            neither of them count.
    """

    def more(name: str) -> int:
        return round(after.get(name, 0.0) - before.get(name, 0.0))

    computed = more(f"{_BY_SOURCE}local_compute")
    engine = more(f"{_BY_SOURCE}local_cache_hit")
    node = more(f"{_BY_SOURCE}external_kv_transfer")
    answered = sum(turn.computed_tokens for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    if (computed, engine + node) != (answered, cached):
        raise RateError(
            f"by its counters the engine computed {computed} tokens and had {engine + node}, "
            f"by its answers {answered} and {cached}"
        )
    if preempted := more("vllm:num_preemptions"):
        raise RateError(f"the engine preempted {preempted} requests, and computed them twice")
    memory, nvme = more(f"{_BY_TIER}host"), more(f"{_BY_TIER}disk")
    failed = more(f"{_CONNECTOR}load_failed_pages") * page_tokens
    return Sources(
        engine=engine,
        memory=memory,
        nvme=nvme,
        other_tier=node - memory - nvme,
        computed=computed + failed,
        failed=failed,
    )


def connector_counts(before: Metrics, after: Metrics) -> dict[str, int]:
    """What the connector counted between two readings, by name, without what stayed the same."""
    return {
        name.removeprefix(_CONNECTOR): round(value - before.get(name, 0.0))
        for name, value in after.items()
        if name.startswith(_CONNECTOR) and value != before.get(name, 0.0)
    }
