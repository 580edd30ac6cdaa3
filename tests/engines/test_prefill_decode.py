"""Prefill and decode apart: a consumer waits for what a producer is still saving."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.engines import held_transfers
from tests.engines.held_transfers import HeldTransfers, Stop
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import (
    BLOCK_TOKENS,
    VllmEngine,
    loadable_tokens,
    octavo_connector,
)
from tests.nodes import NodeProcess

pytestmark = pytest.mark.long

PENDING_TIMEOUT_S = 4.0
HELD_S = 1.5
"""A save may be held for less than the consumer waits."""

COMPUTE_S = 2.0
"""More than this engine takes to compute a prompt, with a second engine beside it."""

PREFILL_TOKENS = 1
"""A prefill engine computes the prompt and makes one token, which the consumer makes again."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> HeldTransfers:
    return HeldTransfers(tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def kept_producer(
    node: NodeProcess, held: HeldTransfers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    connector = {**octavo_connector(node.address), "kv_role": "kv_producer"}
    with VllmEngine(
        tmp_path_factory.mktemp("producer"),
        connector=held_transfers.connector_of(connector),
        environment=held.environment,
    ) as engine:
        yield engine


@pytest.fixture
def producer(kept_producer: VllmEngine) -> VllmEngine:
    """Started again where a test has killed it."""
    return kept_producer if kept_producer.is_running else kept_producer.start()


@pytest.fixture(scope="module")
def consumer(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    connector = octavo_connector(node.address, pending_timeout_s=PENDING_TIMEOUT_S)
    with VllmEngine(
        tmp_path_factory.mktemp("consumer"), connector={**connector, "kv_role": "kv_consumer"}
    ) as engine:
        yield engine


def handed_on(producer: VllmEngine, stop: Stop, token_ids: list[int]) -> Request:
    """The request as a router hands it on: the producer has answered, its save is at ``stop``."""
    stop.arm()
    (answer,) = producer.generate([Request(token_ids, max_tokens=PREFILL_TOKENS)]).answers
    stop.wait()
    assert answer.kv_transfer_params == {
        "octavo": {"tokens": len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS}
    }
    return Request(token_ids, kv_transfer_params=answer.kv_transfer_params)


def test_consumer_waits_until_the_producer_has_saved(
    producer: VllmEngine, consumer: VllmEngine, held: HeldTransfers, reference: Reference
) -> None:
    """Whether the node has heard of the pages already, or only the request tells of them."""
    for seed, stop in ((500, held.save), (501, held.fill)):
        request = handed_on(producer, stop, prompt(seed, 600))
        bystander = Request(prompt(seed + 50, 100))
        consumer.submit([request, bystander])
        time.sleep(HELD_S)
        stop.release()
        found, unaware = (answers := consumer.result()).answers
        assert answers.token_ids == reference.token_ids([request, bystander])
        assert found.cached_token_count == loadable_tokens(request)
        assert found.ttft_s is not None
        assert found.ttft_s >= HELD_S
        # Waiting is for those whose pages are to come: others go on.
        assert unaware.ttft_s is not None
        assert unaware.ttft_s < HELD_S


def test_consumer_waits_for_pages_that_are_being_written_without_being_told(
    producer: VllmEngine, consumer: VllmEngine, held: HeldTransfers, reference: Reference
) -> None:
    untold = replace(handed_on(producer, held.fill, prompt(502, 600)), kv_transfer_params=None)
    consumer.submit([untold])
    time.sleep(HELD_S)
    held.fill.release()
    found = consumer.result()
    assert found.token_ids == reference.token_ids([untold])
    assert found.cached_token_counts == [loadable_tokens(untold)]


@pytest.mark.parametrize(("stop_name", "seed"), [("save", 503), ("fill", 504)])
def test_producer_killed_before_it_has_saved_costs_at_most_the_time_to_wait(
    stop_name: str,
    seed: int,
    producer: VllmEngine,
    consumer: VllmEngine,
    held: HeldTransfers,
    reference: Reference,
) -> None:
    stop: Stop = getattr(held, stop_name)
    request = handed_on(producer, stop, prompt(seed, 600))
    consumer.submit([request])
    time.sleep(HELD_S)
    producer.kill()
    stop.release()
    (answer,) = (answers := consumer.result()).answers
    assert answers.token_ids == reference.token_ids([request])
    assert answer.cached_token_count == 0
    assert answer.ttft_s is not None
    assert HELD_S <= answer.ttft_s <= PENDING_TIMEOUT_S + COMPUTE_S
    # Nothing that the producer left half-done is in the way of the next one.
    consumer.reset_prefix_cache()
    plain = Request(request.token_ids)
    again = consumer.generate([plain])
    assert again.token_ids == reference.token_ids([plain])
    assert again.answers[0].ttft_s is not None
    assert again.answers[0].ttft_s <= COMPUTE_S
