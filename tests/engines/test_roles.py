"""Engines that only save or only load, and configurations with which none starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import (
    EngineEndedError,
    VllmEngine,
    loadable_tokens,
    octavo_connector,
)
from tests.nodes import NodeProcess

pytestmark = pytest.mark.long


def test_producer_only_saves_and_consumer_only_loads(
    node: NodeProcess, reference: Reference, tmp_path: Path
) -> None:
    connector = octavo_connector(node.address)
    requests = [Request(prompt(seed, 400)) for seed in (300, 301)]
    loadable = [loadable_tokens(each) for each in requests]
    expected = reference.token_ids(requests)
    with (
        VllmEngine(tmp_path, connector={**connector, "kv_role": "kv_producer"}) as producer,
        VllmEngine(tmp_path, connector={**connector, "kv_role": "kv_consumer"}) as consumer,
    ):
        # What only the consumer has computed is nowhere: it saves nothing.
        assert consumer.generate(requests).token_ids == expected
        consumer.drain()
        consumer.reset_prefix_cache()
        again = consumer.generate(requests)
        assert again.token_ids == expected
        assert again.cached_token_counts == [0, 0]
        consumer.reset_prefix_cache()

        assert producer.generate(requests).token_ids == expected
        producer.drain()
        producer.reset_prefix_cache()
        computed_again = producer.generate(requests)
        assert computed_again.cached_token_counts == [0, 0]

        loaded = consumer.generate(requests)
        assert loaded.token_ids == expected
        assert loaded.cached_token_counts == loadable


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"kv_connector_extra_config": {"adress": "x"}}, "unknown adress"),
    ],
    ids=["failure-policy", "unknown-key"],
)
def test_engine_does_not_start_and_says_why(
    change: dict[str, Any], reason: str, node: NodeProcess, tmp_path: Path
) -> None:
    connector = {**octavo_connector(node.address), **change}
    with (
        pytest.raises(EngineEndedError, match=reason),
        VllmEngine(tmp_path, connector=connector),
    ):
        pass
