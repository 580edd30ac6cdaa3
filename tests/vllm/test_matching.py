"""Lookups: off the caller's thread, in order, and without leaving holds behind."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from tests.nodes import NodeProcess
from tests.vllm.engine import ANSWER_S, Engine, engine_kv

from octavo import Client
from octavo.errors import InvalidRequest
from octavo.vllm.matching import HOLDS_MAX, Lookup, Matcher
from octavo.vllm.params import Retention
from octavo.vllm.settings import ConnectorSettings
from octavo.wishes import SessionHint

PROMPT = list(range(100, 300))
ALWAYS = ConnectorSettings(load_policy="always", match_timeout_s=20.0)


@pytest.fixture
def engine(node: NodeProcess) -> Iterator[Engine]:
    """One whose prompt is stored."""
    with Engine(node.address, engine_kv(), ALWAYS) as started:
        started.serve(PROMPT)
        started.drain()
        yield started


def open_holds(client: Client) -> int:
    return int(client.statistics().gauges["holds"])


def eventually_no_holds(client: Client) -> bool:
    deadline_s = time.monotonic() + ANSWER_S
    while open_holds(client) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return open_holds(client) == 0


def test_a_hold_lasts_until_the_load_has_ended_and_no_longer(engine: Engine) -> None:
    assert engine.serve(PROMPT).loaded_tokens == 192
    with engine.client(engine.layout) as client:
        assert eventually_no_holds(client)
        assert client.statistics().counters["holds_granted"] >= 1


def test_a_lookup_that_is_given_up_keeps_no_hold(engine: Engine) -> None:
    client = engine.client(engine.layout)
    matcher = Matcher(client, lambda _name, _count: None)
    for wait in (True, False):  # given up after its answer, and before
        lookup = Lookup(client.chain(), 0, PROMPT, {}, hold=True)
        matcher.submit(lookup, ANSWER_S)
        if wait:
            assert lookup.wait(ANSWER_S)
            assert lookup.match.page_count == 6
        matcher.abandon(lookup)
        assert lookup.wait(ANSWER_S)
        assert lookup.match.page_count == 0
        assert eventually_no_holds(client)
    matcher.close()


def test_more_requests_than_a_session_may_hold_for_all_find_their_pages(engine: Engine) -> None:
    client = engine.client(engine.layout)
    matcher = Matcher(client, lambda _name, _count: None)
    lookups = [Lookup(client.chain(), 0, PROMPT, {}, hold=True) for _each in range(HOLDS_MAX + 30)]
    for lookup in lookups:
        matcher.submit(lookup, ANSWER_S)
    assert all(lookup.wait(ANSWER_S) for lookup in lookups)
    assert [lookup.match.page_count for lookup in lookups] == [6] * len(lookups)
    held = sum(lookup.match.hold is not None for lookup in lookups)
    assert held == HOLDS_MAX
    for lookup in lookups:
        matcher.abandon(lookup)
    assert eventually_no_holds(client)
    matcher.close()


def test_tokens_that_overtook_earlier_ones_are_never_matched(engine: Engine) -> None:
    """Two threads run lookups: the second of a request must not be hashed as its beginning."""
    client = engine.client(engine.layout)
    matcher = Matcher(client, lambda _name, _count: None)
    chain = client.chain()
    early = Lookup(chain, 64, PROMPT[:96], {}, hold=False)
    matcher.submit(early, ANSWER_S)
    assert early.wait(ANSWER_S)
    assert early.match.page_count == 0
    assert chain.token_count == 0
    first = Lookup(chain, 0, PROMPT, {}, hold=False)
    matcher.submit(first, ANSWER_S)
    assert first.wait(ANSWER_S)
    assert first.match.page_count == 6
    matcher.close()


def test_long_prompts_are_hashed_in_pieces_to_the_same_keys(engine: Engine) -> None:
    client = engine.client(engine.layout)
    client.connect()
    matcher = Matcher(client, lambda _name, _count: None)
    prompt = [number % 50_000 for number in range(32 * 1000 + 5)]
    lookup = Lookup(client.chain(), 0, prompt, {0: (b"salt",)}, hold=False)
    matcher.submit(lookup, ANSWER_S)
    assert lookup.wait(ANSWER_S)
    whole = client.chain()
    whole.extend(prompt, {0: (b"salt",)})
    assert lookup.chain.keys == whole.keys
    matcher.close()


def test_a_token_that_is_none_is_a_miss_and_the_threads_live_on(engine: Engine) -> None:
    client = engine.client(engine.layout)
    refused: list[str] = []
    matcher = Matcher(client, lambda name, _count: refused.append(name))
    for tokens, pages in (([-1, 2], 0), (PROMPT, 6), (PROMPT, 6), (PROMPT, 6)):
        lookup = Lookup(client.chain(), 0, tokens, {}, hold=False)
        matcher.submit(lookup, ANSWER_S)
        assert lookup.wait(ANSWER_S)
        assert lookup.match.page_count == pages
    assert refused == ["match_refused"]
    matcher.close()


@pytest.mark.parametrize("error", [InvalidRequest("no"), RuntimeError("a fault of ours")])
def test_lookups_that_fail_keep_no_hold_and_end_no_thread(
    engine: Engine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = engine.client(engine.layout)
    matcher = Matcher(client, lambda _name, _count: None)
    with monkeypatch.context() as broken:
        broken.setattr(client, "match", Mock(side_effect=error))
        failing = [Lookup(client.chain(), 0, PROMPT, {}, hold=True) for _each in range(HOLDS_MAX)]
        for lookup in failing:
            matcher.submit(lookup, ANSWER_S)
        assert all(lookup.wait(ANSWER_S) for lookup in failing)
        assert not any(lookup.match.page_count for lookup in failing)
    lookup = Lookup(client.chain(), 0, PROMPT, {}, hold=True)
    matcher.submit(lookup, ANSWER_S)
    assert lookup.wait(ANSWER_S)
    assert lookup.match.hold is not None
    matcher.abandon(lookup)
    assert eventually_no_holds(client)
    matcher.close()


@pytest.mark.parametrize("error", [InvalidRequest("no"), RuntimeError("a fault of ours")])
def test_wishes_and_hints_that_fail_are_counted_and_end_no_thread(
    engine: Engine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = engine.client(engine.layout)
    counted: Counter[str] = Counter()
    matcher = Matcher(client, lambda name, count: counted.update({name: count}))
    fault = Mock(side_effect=error)
    monkeypatch.setattr(client, "retain", fault)
    monkeypatch.setattr(client, "hint", fault)
    for _each in range(2):  # more faults than there are threads
        matcher.retain(client.chain(), Retention(pin_s=1.0), 3)
        matcher.tell(SessionHint("s"), None, "default")
    lookup = Lookup(client.chain(), 0, PROMPT, {}, hold=False)
    matcher.submit(lookup, ANSWER_S)
    assert lookup.wait(ANSWER_S)
    assert lookup.match.page_count == 6
    matcher.close()
    deadline_s = time.monotonic() + ANSWER_S
    while counted != {"unpinned_pages": 6, "hints_lost": 2}:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_closing_ends_the_threads(engine: Engine) -> None:
    before = threading.active_count()
    matcher = Matcher(engine.client(engine.layout), lambda _name, _count: None)
    assert threading.active_count() > before
    matcher.close()
    deadline_s = time.monotonic() + ANSWER_S
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() <= before
