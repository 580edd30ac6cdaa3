"""Times to live, pins and hints of requests, from the connector's halves to a real node."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.nodes import NodeProcess
from tests.vllm.engine import ANSWER_S, Engine, engine_kv

from octavo import Statistics
from octavo.vllm.identity import RequestIdentity
from octavo.vllm.params import RequestParams, Retention
from octavo.vllm.requests import NewRequest
from octavo.vllm.settings import ConnectorSettings, Role
from octavo.wishes import SessionHint

PROMPT = list(range(100, 300))
"""200 tokens: 6 blocks of 32, and 8 tokens."""

ALWAYS = ConnectorSettings(load_policy="always", match_timeout_s=20.0)


def statistics(engine: Engine) -> Statistics:
    return engine.workers[0].client.statistics()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + ANSWER_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def wished(**wishes: float) -> RequestParams:
    return RequestParams(retention=Retention(**wishes))


def test_what_a_request_stores_for_a_time_is_gone_after_it(node: NodeProcess) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as engine:
        engine.serve(PROMPT, params=wished(ttl_s=1.0))
        engine.drain()
        assert engine.count("saved_pages") == 6
        loads_only = RequestParams(store=False)
        until(lambda: engine.serve(PROMPT, params=loads_only).loaded_tokens == 0)


def test_a_request_with_a_time_to_live_prolongs_what_it_finds(node: NodeProcess) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as engine:
        begin_s = time.monotonic()
        engine.serve(PROMPT, params=wished(ttl_s=6.0))
        engine.drain()
        assert engine.serve(PROMPT, params=wished(ttl_s=600.0)).loaded_tokens == 192
        time.sleep(max(0.0, begin_s + 6.5 - time.monotonic()))
        assert engine.serve(PROMPT).loaded_tokens == 192


def test_a_pin_is_of_what_is_stored_and_of_what_was_found(mortal_node: NodeProcess) -> None:
    with Engine(mortal_node.address, engine_kv(), ALWAYS) as engine:
        engine.serve(PROMPT[:100])
        engine.drain()
        assert statistics(engine).gauges["kept_pages"] == 0
        engine.serve(PROMPT, params=wished(pin_s=60.0))
        engine.drain()
        until(lambda: statistics(engine).gauges["kept_pages"] == 6)
        assert engine.count("unpinned_pages") == 0


def test_a_consumer_pins_what_it_finds_and_a_request_that_stores_nothing_does_not(
    mortal_node: NodeProcess,
) -> None:
    with Engine(mortal_node.address, engine_kv(), ALWAYS, role=Role.PRODUCER) as producer:
        producer.serve(PROMPT)
        producer.drain()
    with Engine(mortal_node.address, engine_kv(), ALWAYS, role=Role.CONSUMER) as consumer:
        only_loads = RequestParams(store=False, retention=Retention(pin_s=60.0))
        assert consumer.serve(PROMPT, params=only_loads).loaded_tokens == 192
        assert consumer.serve(PROMPT).loaded_tokens == 192
        assert statistics(consumer).gauges["kept_pages"] == 0
        assert consumer.serve(PROMPT, params=wished(pin_s=60.0)).loaded_tokens == 192
        until(lambda: statistics(consumer).gauges["kept_pages"] == 6)


def test_pins_without_room_are_counted_and_cost_nothing_else(tmp_path: Path) -> None:
    with (
        NodeProcess(tmp_path, pin_share=0) as node,
        Engine(node.address, engine_kv(), ALWAYS) as engine,
    ):
        engine.serve(PROMPT[:100])
        engine.drain()
        assert engine.serve(PROMPT, params=wished(pin_s=60.0)).loaded_tokens == 96
        engine.drain()
        until(lambda: engine.count("unpinned_pages") == 6)
        assert engine.serve(PROMPT).loaded_tokens == 192


def test_a_sessions_hints_come_before_and_after_its_request(mortal_node: NodeProcess) -> None:
    def heard(kind: str) -> int:
        return statistics(engine).counters[f"hints_{kind}"]

    pause = SessionHint("s", pause_s=30.0)
    with Engine(mortal_node.address, engine_kv(), ALWAYS) as engine:
        engine.serve(PROMPT, params=RequestParams(conversation="s", afterwards=pause))
        until(lambda: heard("pause") == 1)
        assert heard("ongoing") == 1
        assert statistics(engine).gauges["waiting_conversations"] == 1
        engine.serve(PROMPT, params=RequestParams(conversation="s"))
        assert heard("ongoing") == 2
        assert statistics(engine).gauges["waiting_conversations"] == 0
        ended = SessionHint("s", ended=True)
        engine.serve(PROMPT, params=RequestParams(conversation="s", afterwards=ended))
        until(lambda: heard("ended") == 1)
        assert statistics(engine).gauges["conversations"] == 0
        engine.serve(PROMPT)
        assert heard("ongoing") == 3
        assert engine.count("hints_lost") == 0


def test_a_producer_leaves_it_to_the_consumer_to_tell_the_end(mortal_node: NodeProcess) -> None:
    params = RequestParams(conversation="s", afterwards=SessionHint("s", ended=True))
    with Engine(mortal_node.address, engine_kv(), ALWAYS, role=Role.PRODUCER) as producer:
        producer.serve(PROMPT, params=params)
        producer.drain()
        assert statistics(producer).counters["hints_ongoing"] == 1
    with Engine(mortal_node.address, engine_kv(), ALWAYS, role=Role.CONSUMER) as consumer:
        consumer.serve(PROMPT, params=params)
        until(lambda: statistics(consumer).counters["hints_ended"] == 1)
        assert statistics(consumer).gauges["conversations"] == 0


def test_a_consumer_that_asks_many_times_tells_of_its_session_once(
    mortal_node: NodeProcess,
) -> None:
    settings = ConnectorSettings(load_policy="always", match_timeout_s=20.0, pending_timeout_s=0.3)
    with Engine(mortal_node.address, engine_kv(), settings, role=Role.CONSUMER) as consumer:
        consumer.serve(PROMPT, params=RequestParams(tokens=192, conversation="s"))
        assert consumer.count("matches") > 1
        assert statistics(consumer).counters["hints_ongoing"] == 1


def test_hints_that_nobody_hears_are_counted(mortal_node: NodeProcess) -> None:
    params = RequestParams(conversation="s", afterwards=SessionHint("s", ended=True))
    settings = ConnectorSettings(load_policy="always", match_timeout_s=0.2)
    with Engine(mortal_node.address, engine_kv(), settings) as engine:
        mortal_node.kill()
        assert engine.serve(PROMPT, params=params).loaded_tokens == 0
        until(lambda: engine.count("hints_lost") == 1)


def test_after_a_reset_hints_are_told_without_the_pages_of_before(mortal_node: NodeProcess) -> None:
    params = RequestParams(conversation="s", afterwards=SessionHint("s", tool_call=True))
    with Engine(mortal_node.address, engine_kv(), ALWAYS) as engine:
        scheduler = engine.scheduler
        scheduler.new_request(
            NewRequest("r", PROMPT, params, RequestIdentity(), may_load=True, may_save=True)
        )
        scheduler.next_epoch()
        scheduler.request_ended("r")
        until(lambda: statistics(engine).counters["hints_tool_call"] == 1)
        assert engine.count("hints_lost") == 0
