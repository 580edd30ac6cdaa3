"""A real model: its answers stay the same, and its long prompts come back in little time."""

from __future__ import annotations

import statistics
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engines.jobs import Answer, Request
from tests.engines.reference import prompt
from tests.engines.vllm_engine import VllmEngine, loadable_tokens, octavo_connector
from tests.nodes import NodeProcess

from octavo.demo.checkpoint import ensure_checkpoint

pytestmark = pytest.mark.long

PROMPT_TOKENS = 2048
REQUESTS = [Request(prompt(seed, PROMPT_TOKENS)) for seed in range(200, 205)]
WARM_UP = Request(prompt(199, 100))
COLD_SHARE_MAX = 0.06
OWN_HIT_RATIO_MAX = 2.0


@dataclass(frozen=True)
class Measured:
    """Answers to ``REQUESTS``, asked one after another."""

    alone: list[Answer]
    """From an engine without connector."""
    saving: list[Answer]
    """From one that found nothing and saved."""
    loaded: list[Answer]
    """From the next one, which had to load."""
    own_hit: list[Answer]
    """From that one, asked again."""


@contextmanager
def engine_of(folder: Path, connector: dict[str, Any] | None) -> Generator[VllmEngine]:
    model = str(ensure_checkpoint(print))
    with VllmEngine(
        folder, connector=connector, model=model, kv_cache_memory_bytes=1 << 30
    ) as engine:
        engine.generate([WARM_UP])
        yield engine


def ask(engine: VllmEngine) -> list[Answer]:
    return [engine.generate([request]).answers[0] for request in REQUESTS]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("smollm2")
    with engine_of(folder, None) as engine:
        alone = ask(engine)
    with NodeProcess(folder / "node", memory_bytes="1GiB", staging_ring_bytes="64MiB") as node:
        connector = octavo_connector(node.address)
        with engine_of(folder, connector) as engine:
            saving = ask(engine)
            engine.drain()
            engine.stop()
        with engine_of(folder, connector) as engine:
            loaded = ask(engine)
            own_hit = ask(engine)
    return Measured(alone, saving, loaded, own_hit)


def median_ttft_s(answers: list[Answer]) -> float:
    return statistics.median(each.ttft_s for each in answers if each.ttft_s is not None)


def test_answers_are_those_of_an_engine_without_connector(measured: Measured) -> None:
    expected = [each.token_ids for each in measured.alone]
    assert [each.token_ids for each in measured.saving] == expected
    assert [each.token_ids for each in measured.loaded] == expected
    assert [each.cached_token_count for each in measured.saving] == [0] * len(REQUESTS)
    assert [each.cached_token_count for each in measured.loaded] == [
        loadable_tokens(each) for each in REQUESTS
    ]


def test_long_prompt_after_an_engine_restart_is_nearly_as_fast_as_the_engine_s_own_hit(
    measured: Measured,
) -> None:
    cold_s, loaded_s, own_hit_s = map(
        median_ttft_s, (measured.alone, measured.loaded, measured.own_hit)
    )
    print(f"TTFT medians: {cold_s=:.3f} {loaded_s=:.4f} {own_hit_s=:.4f}")
    assert loaded_s <= COLD_SHARE_MAX * cold_s
    assert loaded_s <= OWN_HIT_RATIO_MAX * own_hit_s
