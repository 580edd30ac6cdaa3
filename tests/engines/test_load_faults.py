"""Whatever befalls a load, its request gets the right answer, and so do the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines import held_transfers
from tests.engines.held_transfers import HeldTransfers, Stop
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import (
    BLOCK_TOKENS,
    Mode,
    VllmEngine,
    loadable_tokens,
    octavo_connector,
)
from tests.nodes import NodeProcess

LONG = pytest.mark.long
REQUESTS = [Request(prompt(seed, 400)) for seed in (90, 91)]
"""Each loads twelve blocks of 32 tokens."""

BLOCK_COUNT = 40
"""Of the engine's KV cache: so few that blocks given back too early would be used at once."""

LOAD_TIMEOUT_S = 5.0


@pytest.fixture
def held(tmp_path: Path) -> HeldTransfers:
    return HeldTransfers(tmp_path / "held")


@pytest.fixture
def load(held: HeldTransfers) -> Stop:
    """Where loads stop, half-way."""
    return held.load


@pytest.fixture
def mode() -> Mode:
    return Mode.IN_PROCESS


@pytest.fixture
def loading() -> str:
    """The connector's setting ``load``."""
    return "async"


@pytest.fixture
def engine(
    node: NodeProcess, held: HeldTransfers, mode: Mode, loading: str, tmp_path: Path
) -> Iterator[VllmEngine]:
    """An engine that has forgotten ``REQUESTS``, which the node has."""
    plain = octavo_connector(node.address, load=loading, load_timeout_s=LOAD_TIMEOUT_S)
    with VllmEngine(
        tmp_path,
        connector=held_transfers.connector_of(plain),
        mode=mode,
        environment=held.environment,
        num_gpu_blocks_override=BLOCK_COUNT,
        max_model_len=1024,
    ) as running:
        running.generate(REQUESTS)
        running.drain()
        running.reset_prefix_cache()
        yield running


def failed_pages(engine: VllmEngine) -> float:
    return engine.metrics()["vllm:octavo_load_failed_pages"]


@pytest.mark.parametrize(
    ("mode", "loading"),
    [
        (Mode.IN_PROCESS, "async"),
        pytest.param(Mode.IN_PROCESS, "sync", marks=LONG),
        pytest.param(Mode.TWO_WORKERS, "async", marks=LONG),
    ],
)
def test_node_killed_in_the_middle_of_a_load(
    engine: VllmEngine, node: NodeProcess, mode: Mode, load: Stop, reference: Reference
) -> None:
    load.arm()
    engine.submit(REQUESTS)
    load.wait()
    node.kill()
    load.release()
    assert engine.result().token_ids == reference.token_ids(REQUESTS)
    lost = sum(loadable_tokens(each) for each in REQUESTS) // BLOCK_TOKENS
    workers = 2 if mode is Mode.TWO_WORKERS else 1
    assert failed_pages(engine) == lost * workers


@LONG
def test_node_stopped_in_the_middle_of_a_load(
    engine: VllmEngine, node: NodeProcess, load: Stop, reference: Reference
) -> None:
    load.arm()
    engine.submit(REQUESTS)
    load.wait()
    node.pause()
    load.release()
    try:
        assert engine.result().token_ids == reference.token_ids(REQUESTS)
        assert failed_pages(engine) > 0
        # A node that still hangs costs the next request no more than a match does.
        engine.reset_prefix_cache()
        next_ones = engine.generate(REQUESTS)
        assert next_ones.token_ids == reference.token_ids(REQUESTS)
        assert next_ones.cached_token_counts == [0, 0]
    finally:
        node.resume()


@LONG
def test_abort_in_the_middle_of_a_load_leaves_other_requests_alone(
    engine: VllmEngine, load: Stop, reference: Reference
) -> None:
    """The load still writes when its request is gone: into blocks that nobody else may have."""
    load.arm()
    aborted = Request(REQUESTS[0].token_ids, abort_once=str(load.held))
    (answer,) = engine.generate([aborted]).answers
    assert answer.token_ids == []
    # These need more blocks than are left beside those of the aborted request.
    others = [Request(prompt(seed, 350), max_tokens=250) for seed in (92, 93, 94)]
    engine.submit(others)
    time.sleep(0.5)
    load.release()
    assert engine.result().token_ids == reference.token_ids(others)
    engine.reset_prefix_cache()
    assert engine.generate(REQUESTS).token_ids == reference.token_ids(REQUESTS)


@LONG
def test_engine_starts_without_a_node_and_finds_it_later(
    reference: Reference, tmp_path: Path
) -> None:
    node = NodeProcess(tmp_path / "node")
    requests = REQUESTS[:1]
    with VllmEngine(tmp_path, connector=octavo_connector(node.address)) as engine:
        assert engine.generate(requests).token_ids == reference.token_ids(requests)
        with node:
            deadline = time.monotonic() + 60.0
            while True:
                engine.reset_prefix_cache()
                found = engine.generate(requests)
                assert found.token_ids == reference.token_ids(requests)
                if found.cached_token_counts[0]:
                    break
                engine.drain()
                assert time.monotonic() < deadline
                time.sleep(0.5)
