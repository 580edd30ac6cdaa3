"""What requests to a real engine wish for their pages and tell of their sessions arrives."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import VllmEngine, loadable_tokens, octavo_connector
from tests.nodes import NodeProcess

from octavo import Client, Layout, Statistics

HAS_HINTS = bool(importlib.util.find_spec("vllm") and importlib.util.find_spec("vllm.v1.kv_hints"))

ANSWER_S = 20.0
PAGES = 3
"""Of a prompt of these tests: a page is a block of 32 tokens."""


@dataclass
class World:
    node: NodeProcess
    engine: VllmEngine
    reference: Reference

    def statistics(self) -> Statistics:
        layout = Layout(name="any", model="any", layers=1, kv_heads=1, head_dim=32)
        with Client(self.node.address, layouts=[layout]) as client:
            return client.statistics()

    def until(self, holds: Callable[[Statistics], bool]) -> None:
        deadline_s = time.monotonic() + ANSWER_S
        while not holds(self.statistics()):
            assert time.monotonic() < deadline_s, self.statistics()
            time.sleep(0.05)

    def ask(self, request: Request) -> int:
        """Tokens that were loaded; the answer is that of an engine without connector."""
        self.engine.reset_prefix_cache()
        found = self.engine.generate([request])
        self.engine.drain()
        assert found.token_ids == self.reference.token_ids([request])
        return found.cached_token_counts[0]


@pytest.fixture(scope="module")
def world(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("wishes")
    with (
        NodeProcess(folder / "node") as node,
        VllmEngine(folder, connector=octavo_connector(node.address)) as engine,
    ):
        yield World(node, engine, reference)


def request_of(seed: int, said: dict[str, Any] | None = None) -> Request:
    params = None if said is None else {"octavo": said}
    return Request(prompt(seed, 110), kv_transfer_params=params)


def test_what_was_stored_for_a_time_is_computed_after_it(world: World) -> None:
    mortal, other = request_of(300, {"ttl_s": 3}), request_of(301)
    before = world.statistics().counters["expired_pages"]
    assert world.ask(mortal) == 0
    assert world.ask(other) == 0
    world.until(lambda found: found.counters["expired_pages"] >= before + PAGES)
    assert world.ask(mortal) == 0
    assert world.ask(other) == loadable_tokens(other)


def test_a_pin_keeps_what_is_stored_and_what_was_there(world: World) -> None:
    before = world.statistics().gauges["kept_pages"]
    assert world.ask(request_of(310)) == 0
    assert world.statistics().gauges["kept_pages"] == before
    pinned = request_of(310, {"pin_s": 600})
    assert world.ask(pinned) == loadable_tokens(pinned)
    world.until(lambda found: found.gauges["kept_pages"] == before + PAGES)
    assert world.ask(request_of(311, {"pin_s": 600})) == 0
    world.until(lambda found: found.gauges["kept_pages"] >= before + 2 * PAGES)


def test_a_session_is_told_of_before_and_after_its_requests(world: World) -> None:
    counted = world.statistics().counters
    turn = replace(request_of(320, {"session": {"tool_call": True}}), session_id="user-7")
    world.ask(turn)
    world.until(lambda found: found.counters["hints_tool_call"] == counted["hints_tool_call"] + 1)
    assert world.statistics().counters["hints_ongoing"] == counted["hints_ongoing"] + 1
    assert world.statistics().gauges["waiting_conversations"] == 1
    world.ask(replace(request_of(320), session_id="user-7"))
    assert world.statistics().gauges["waiting_conversations"] == 0
    assert world.statistics().gauges["conversations"] == 1
    world.ask(request_of(320, {"session": {"id": "user-7", "ended": True}}))
    world.until(lambda found: found.gauges["conversations"] == 0)


@pytest.mark.skipif(not HAS_HINTS, reason="this vLLM has no kv_hints")
def test_vllms_own_hints_say_the_same(world: World) -> None:
    before = world.statistics()
    hinted = {"pin_s": 600, "session": {"id": "user-8", "pause_s": 30}}
    world.ask(replace(request_of(330), hinted=hinted))
    world.until(lambda found: found.gauges["waiting_conversations"] == 1)
    now = world.statistics()
    assert now.gauges["kept_pages"] >= before.gauges["kept_pages"] + PAGES
    assert now.counters["hints_pause"] == before.counters["hints_pause"] + 1


def test_what_nobody_understands_goes_without_the_cache(world: World) -> None:
    name = "vllm:octavo_bad_params"
    before = world.engine.metrics().get(name, 0.0)
    stored = world.statistics().counters["put_pages_stored"]
    assert world.ask(request_of(340, {"ttl_s": -1})) == 0
    assert world.ask(request_of(340, {"session": {"id": "s", "ended": 1}})) == 0
    assert world.statistics().counters["put_pages_stored"] == stored
    assert world.engine.metrics()[name] == before + 2
