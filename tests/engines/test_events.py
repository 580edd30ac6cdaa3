"""What an engine publishes of blocks on the node, as a router hears it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.engines.jobs import Request
from tests.engines.reference import prompt
from tests.engines.vllm_engine import BLOCK_TOKENS, VllmEngine, octavo_connector
from tests.nodes import NodeProcess

pytest.importorskip("zmq", reason="comes with vLLM")

from tests.engines.event_subscriber import DEVICE, NODE, EventSubscriber

pytestmark = pytest.mark.long

WHOLE = Request(prompt(600, 10 * BLOCK_TOKENS + 7), max_tokens=4)
NEXT_STEP = Request(prompt(601, 5), max_tokens=2)
"""Fills no block. An engine publishes what has happened with its next step."""

RECONNECT_S = 60.0


def test_a_router_hears_which_blocks_lie_on_the_node(node: NodeProcess, tmp_path: Path) -> None:
    connector = octavo_connector(node.address)
    with (
        EventSubscriber() as heard,
        VllmEngine(tmp_path, connector=connector, kv_events_config=heard.config) as engine,
    ):
        engine.generate([WHOLE])
        engine.drain()
        engine.generate([NEXT_STEP])
        stored = heard.hashes(NODE, stored=True)
        assert len(stored) == 10
        # Under the names that the engine gives its own blocks, or no router could tell.
        assert stored == heard.hashes(DEVICE, stored=True)
        assert heard.hashes(NODE, stored=False) == []
        on_node = [each for each in heard.events if each.medium == NODE]
        token_ids = [token for each in on_node for token in each.token_ids]
        assert token_ids == WHOLE.token_ids[: 10 * BLOCK_TOKENS]
        assert {each.block_tokens for each in on_node} == {BLOCK_TOKENS}
        first = [None, *stored]
        assert [each.parent for each in on_node] == [
            first[stored.index(each.hashes[0])] for each in on_node
        ]

        # A node that has lost them: the next match tells, and computing brings them back.
        node.kill()
        node.start()
        heard.forget()
        deadline = time.monotonic() + RECONNECT_S
        while heard.hashes(NODE, stored=True) != stored:
            assert time.monotonic() < deadline, heard.events
            engine.reset_prefix_cache()
            engine.generate([WHOLE])
            engine.drain()
            engine.generate([NEXT_STEP])
        assert heard.hashes(NODE, stored=False) == stored

        heard.forget()
        engine.reset_prefix_cache(reset_connector=True)
        engine.generate([NEXT_STEP])
        assert sorted(heard.hashes(NODE, stored=False)) == sorted(stored)
        engine.stop()


def test_an_engine_tells_of_blocks_that_another_one_has_stored(
    node: NodeProcess, tmp_path: Path
) -> None:
    connector = octavo_connector(node.address)
    with VllmEngine(tmp_path, connector=connector) as first:
        first.generate([WHOLE])
        first.stop()
    with (
        EventSubscriber() as heard,
        VllmEngine(tmp_path, connector=connector, kv_events_config=heard.config) as second,
    ):
        (answer,) = second.generate([WHOLE]).answers
        assert answer.cached_token_count == 10 * BLOCK_TOKENS
        second.generate([NEXT_STEP])
        stored = heard.hashes(NODE, stored=True)
        assert len(stored) == 10
        assert stored == heard.hashes(DEVICE, stored=True)
