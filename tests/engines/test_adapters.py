"""LoRA adapters: KV that one has made is loaded for it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.tiny_adapter import RANK, make_adapter
from tests.engines.vllm_engine import VllmEngine, loadable_tokens, octavo_connector
from tests.nodes import NodeProcess

pytestmark = pytest.mark.long

PLAIN = Request(prompt(400, 300))
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def test_a_prompt_shares_nothing_across_adapters_and_hits_with_its_own_after_a_restart(
    node: NodeProcess, reference: Reference, tmp_path: Path
) -> None:
    one, other = (make_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "other")))
    # Of the same name, as a later training of it would be.
    retrained = make_adapter(tmp_path / "later" / "one", 2)
    requests = [PLAIN, *(replace(PLAIN, adapter=str(each)) for each in (one, other))]
    later = replace(PLAIN, adapter=str(retrained))
    with VllmEngine(tmp_path, **OPTIONS) as without:
        alone = [without.generate([each]).token_ids[0] for each in (*requests, later)]
    assert alone[0] == reference.token_ids([PLAIN])[0]
    assert len({tuple(each) for each in alone}) == len(alone), "an adapter changes no answer"

    connector = octavo_connector(node.address)
    with VllmEngine(tmp_path, connector=connector, **OPTIONS) as engine:
        for request, expected in zip(requests, alone, strict=False):
            # One after another, so that the node has all there is of those before.
            cold = engine.generate([request])
            assert cold.token_ids == [expected]
            assert cold.cached_token_counts == [0]
            engine.drain()
        engine.stop()
    with VllmEngine(tmp_path, connector=connector, **OPTIONS) as engine:
        # In a batch with adapters, vLLM 0.32 on a CPU takes the last of them for requests without
        # any: it indexes the adapters' weights with the -1 that says "none".
        for batch, answers in ((requests[:1], alone[:1]), (requests[1:], alone[1:-1])):
            warm = engine.generate(batch)
            assert warm.token_ids == answers
            assert warm.cached_token_counts == [loadable_tokens(PLAIN)] * len(batch)
        engine.reset_prefix_cache()
        changed = engine.generate([later])
        assert changed.token_ids == alone[-1:]
        assert changed.cached_token_counts == [0]
