"""Wrong KV shows in the tokens: the tests that compare them would notice."""

from __future__ import annotations

from pathlib import Path

from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.tiny_model import ensure_tiny_model
from tests.engines.vllm_engine import VllmEngine, loadable_tokens, octavo_connector
from tests.nodes import NodeProcess

REQUESTS = [Request(prompt(seed, 200 + 60 * seed % 500)) for seed in range(100, 108)]
OTHER_SEED = 1


def test_kv_of_other_weights_is_not_found_unless_it_lies_and_then_changes_every_answer(
    node: NodeProcess, reference: Reference, tmp_path: Path
) -> None:
    """Another random model has the same shapes, so to this one its KV is noise."""
    expected = reference.token_ids(REQUESTS)
    honest = octavo_connector(node.address)
    lying = octavo_connector(node.address, model="same", weights_revision="same")
    other_model = str(ensure_tiny_model(OTHER_SEED))
    for connector in (honest, lying):
        with VllmEngine(tmp_path, connector=connector, model=other_model) as other:
            assert all(
                answer != right
                for answer, right in zip(other.generate(REQUESTS).token_ids, expected, strict=True)
            )
            other.stop()
    with VllmEngine(tmp_path, connector=honest) as engine:
        found = engine.generate(REQUESTS)
        assert found.token_ids == expected
        assert found.cached_token_counts == [0] * len(REQUESTS)
    with VllmEngine(tmp_path, connector=lying) as engine:
        spoilt = engine.generate(REQUESTS)
        assert spoilt.cached_token_counts == [loadable_tokens(each) for each in REQUESTS]
        assert all(
            answer != right for answer, right in zip(spoilt.token_ids, expected, strict=True)
        )
