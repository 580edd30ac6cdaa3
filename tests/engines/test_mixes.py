"""Many requests at once, some of which hit at different lengths and some nowhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import (
    BLOCK_TOKENS,
    VllmEngine,
    loadable_tokens,
    octavo_connector,
)
from tests.nodes import NodeProcess

LONG = pytest.mark.long


@dataclass
class World:
    engine: VllmEngine
    reference: Reference

    def fill(self, requests: list[Request]) -> None:
        """Lets the node have these prompts and the engine forget them."""
        self.engine.generate(requests)
        self.engine.drain()
        self.engine.reset_prefix_cache()

    def assert_same_answers(self, requests: list[Request]) -> list[int]:
        """Token ids as without connector; returns how many tokens each request had cached."""
        found = self.engine.generate(requests)
        assert found.token_ids == self.reference.token_ids(requests)
        return found.cached_token_counts


@pytest.fixture(scope="module")
def world(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("mixes")
    with (
        NodeProcess(folder / "node") as node,
        VllmEngine(folder, connector=octavo_connector(node.address)) as engine,
    ):
        yield World(engine, reference)


def test_hits_of_different_lengths_in_one_batch(world: World) -> None:
    known = [Request(prompt(seed, 320)) for seed in range(30, 34)]
    world.fill(known)
    kept = [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 100, 256, 319, 320]
    requests = [
        Request([*prompt(30 + place % 4, kept_count), *prompt(40 + place, 350 - kept_count)])
        for place, kept_count in enumerate(kept)
    ]
    assert world.assert_same_answers(requests) == [
        kept_count // BLOCK_TOKENS * BLOCK_TOKENS for kept_count in kept
    ]


def test_hit_ends_before_the_last_token_of_a_prompt(world: World) -> None:
    known = Request(prompt(50, 5 * BLOCK_TOKENS), max_tokens=64)
    world.fill([known])
    shorter = [Request(known.token_ids[:length]) for length in (31, 32, 33, 64, 65, 160)]
    for request in shorter:
        world.engine.reset_prefix_cache()
        assert world.assert_same_answers([request]) == [loadable_tokens(request)]


def test_engine_s_own_prefix_and_the_node_s_add_up(world: World) -> None:
    whole = prompt(60, 12 * BLOCK_TOKENS + 5)
    world.fill([Request(whole)])
    own = Request(whole[: 4 * BLOCK_TOKENS + 1])
    assert world.assert_same_answers([own]) == [4 * BLOCK_TOKENS]
    before = world.engine.metrics()
    assert world.assert_same_answers([Request(whole)]) == [12 * BLOCK_TOKENS]
    after = world.engine.metrics()
    name = "vllm:prompt_tokens_by_source/"
    assert after[f"{name}local_cache_hit"] - before[f"{name}local_cache_hit"] == 4 * BLOCK_TOKENS
    external = f"{name}external_kv_transfer"
    assert after[external] - before[external] == 8 * BLOCK_TOKENS


@pytest.mark.parametrize("request_count", [16, pytest.param(64, marks=LONG)])
def test_concurrent_requests(request_count: int, world: World) -> None:
    drawn = random.Random(request_count)
    stems = [prompt(1000 * request_count + stem, 400) for stem in range(5)]
    world.fill([Request(stem) for stem in stems[:3]])
    requests = [
        Request(
            [*drawn.choice(stems)[: drawn.randrange(401)], *prompt(2000 + place, 60)],
            max_tokens=drawn.randrange(1, 40),
        )
        for place in range(request_count)
    ]
    world.assert_same_answers(requests)
    world.fill(requests)
    cached = world.assert_same_answers(requests)
    assert cached == [loadable_tokens(each) for each in requests]


def test_salts_do_not_share(world: World) -> None:
    plain = prompt(70, 200)
    world.fill([Request(plain, cache_salt="one")])
    cached = world.assert_same_answers(
        [Request(plain, cache_salt=salt) for salt in ("two", "one", None)]
    )
    assert cached == [0, 192, 0]


@LONG
def test_prompts_in_chunks_and_requests_that_lose_their_blocks(
    reference: Reference, tmp_path: Path
) -> None:
    """A KV cache of 40 blocks for requests of up to 30: vLLM preempts, and prefills in chunks."""
    requests = [Request(prompt(80 + place, 500), max_tokens=400) for place in range(4)]
    expected = reference.token_ids(requests)
    with (
        NodeProcess(tmp_path / "node", memory_bytes="128MiB") as node,
        VllmEngine(
            tmp_path,
            connector=octavo_connector(node.address),
            num_gpu_blocks_override=40,
            max_model_len=1024,
            max_num_batched_tokens=128,
            enable_chunked_prefill=True,
        ) as engine,
    ):
        for _round in range(3):
            found = engine.generate(requests)
            assert found.token_ids == expected
            engine.drain()
            engine.reset_prefix_cache()
        metrics = engine.metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:prompt_tokens_by_source/external_kv_transfer"] > 0
