"""Many requests at once, some of which hit at different lengths and some nowhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
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


def concurrent(request_count: int, world: World) -> None:
    """Some hit at first, and all of them the second time."""
    drawn = random.Random(request_count)
    stems = [prompt(1000 * request_count + stem, 400) for stem in range(5)]
    world.fill([Request(stem) for stem in stems[:3]])
    requests = [
        Request(
            [*drawn.choice(stems)[: drawn.randrange(401)], *prompt(2000 + place, 60)],
            max_tokens=drawn.randrange(40, 60),
        )
        for place in range(request_count)
    ]
    world.assert_same_answers(requests)
    world.fill(requests)
    found = world.engine.generate(requests)
    assert found.token_ids == world.reference.token_ids(requests)
    assert found.cached_token_counts == [loadable_tokens(each) for each in requests]
    # Not all in one step: the first to be loaded may have ended when the last one comes.
    assert found.most_at_once > request_count // 2


def test_sixteen_concurrent_requests(world: World) -> None:
    concurrent(16, world)


@LONG
def test_64_concurrent_requests(reference: Reference, tmp_path: Path) -> None:
    with (
        NodeProcess(tmp_path / "node", memory_bytes="256MiB") as node,
        VllmEngine(
            tmp_path,
            connector=octavo_connector(node.address),
            max_num_seqs=64,
            kv_cache_memory_bytes=128 << 20,
        ) as engine,
    ):
        concurrent(64, World(engine, reference))


def test_salts_do_not_share(world: World) -> None:
    plain = prompt(70, 200)
    world.fill([Request(plain, cache_salt="one")])
    cached = world.assert_same_answers(
        [Request(plain, cache_salt=salt) for salt in ("two", "one", None)]
    )
    assert cached == [0, 192, 0]


def test_decoded_tokens_are_saved_too(world: World) -> None:
    turn = Request(prompt(20, 200), max_tokens=100)
    (answer,) = world.engine.generate([turn]).token_ids
    world.engine.drain()
    world.engine.reset_prefix_cache()
    next_turn = Request([*turn.token_ids, *answer, *prompt(21, 30)])
    # 200 + 100 tokens, of which the last was never fed back: nine whole blocks of 32.
    assert world.assert_same_answers([next_turn]) == [288]


@LONG
@pytest.mark.parametrize("load", ["async", "sync"])
def test_prompts_in_chunks(
    load: str, node: NodeProcess, reference: Reference, tmp_path: Path
) -> None:
    """Chunks end inside of blocks, for requests that decode have a part of each step."""
    step_tokens = 128
    stems = [prompt(180 + place, 500) for place in range(4)]
    cold = [Request(stem, max_tokens=40 + 20 * place) for place, stem in enumerate(stems)]
    longer = [Request([*stem[:300], *prompt(190, 400)], max_tokens=30) for stem in stems]
    with VllmEngine(
        tmp_path,
        connector=octavo_connector(node.address, load=load),
        max_num_batched_tokens=step_tokens,
        enable_chunked_prefill=True,
    ) as engine:
        for requests, cached_counts in (
            (cold, [0] * 4),
            (cold, [loadable_tokens(each) for each in cold]),
            (longer, [300 // BLOCK_TOKENS * BLOCK_TOKENS] * 4),
            (longer, [loadable_tokens(each) for each in longer]),
        ):
            found = engine.generate(requests)
            assert found.token_ids == reference.token_ids(requests)
            assert found.cached_token_counts == cached_counts
            assert found.step_tokens_max is not None
            assert found.step_tokens_max <= step_tokens
            engine.drain()
            engine.reset_prefix_cache()


@LONG
@pytest.mark.parametrize("load", ["async", "sync"])
def test_requests_that_lose_their_blocks(load: str, reference: Reference, tmp_path: Path) -> None:
    """A KV cache of 40 blocks for four requests of up to 29 each: vLLM preempts."""
    requests = [Request(prompt(80 + place, 500), max_tokens=400) for place in range(4)]
    expected = reference.token_ids(requests)
    with (
        NodeProcess(tmp_path / "node", memory_bytes="128MiB") as node,
        VllmEngine(
            tmp_path,
            connector=octavo_connector(node.address, load=load),
            num_gpu_blocks_override=40,
            max_model_len=1024,
            max_num_batched_tokens=128,
            enable_chunked_prefill=True,
        ) as engine,
    ):
        metrics = [engine.metrics()]
        for _round in range(3):
            assert engine.generate(requests).token_ids == expected
            engine.drain()
            engine.reset_prefix_cache()
            metrics.append(engine.metrics())
    preempted, loaded = "vllm:num_preemptions", "vllm:octavo_loaded_pages"
    assert all(after[preempted] > before[preempted] for before, after in pairwise(metrics))
    # Requests of the last round had loaded before they lost their blocks.
    assert metrics[-1][loaded] > metrics[-2][loaded]
