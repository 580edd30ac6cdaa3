"""Time to live, pins and hints over the protocol: heard, bounded, refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.raw import (
    TIMEOUT_S,
    RawSession,
    assert_invalid,
    chain_of,
    statistics,
    wait_until,
)
from tests.nodes import NodeProcess

from octavo_proto import limits
from octavo_proto.v1 import cache_pb2

Retention, SessionHint = cache_pb2.Retention, cache_pb2.SessionHint
ENDED, PAUSE, TOOL_CALL = (
    cache_pb2.HINT_KIND_ENDED,
    cache_pb2.HINT_KIND_PAUSE,
    cache_pb2.HINT_KIND_TOOL_CALL,
)
DONE, MISSING = cache_pb2.STATUS_DONE, cache_pb2.STATUS_MISSING
QUOTA_EXCEEDED = cache_pb2.STATUS_QUOTA_EXCEEDED


def retain(session: RawSession, chain: cache_pb2.Chain, **fields: Any) -> list[int]:
    request = cache_pb2.RetainRequest(session_id=session.session_id, chain=chain, **fields)
    return list(session.cache.Retain(request, timeout=TIMEOUT_S).statuses)


def test_pages_with_a_time_to_live_go_and_others_stay(session: RawSession) -> None:
    mortal, other = chain_of("mortal", 3), chain_of("other", 2)
    session.store(mortal, retention=Retention(ttl_ms=400))
    begin_s = time.monotonic()
    session.store(other)
    assert session.match(mortal).page_count == 3
    wait_until("expiry", lambda: session.match(mortal).page_count == 0, 5)
    assert time.monotonic() - begin_s > 0.3
    assert session.fetch(mortal) == [MISSING] * 3
    assert session.match(other).page_count == 2


def test_a_time_to_live_survives_a_kill(tmp_path: Path) -> None:
    disk = {"nvme_dir": tmp_path / "nvme", "nvme_bytes": "64MiB"}
    long, short = chain_of("long", 2), chain_of("short", 2)
    with NodeProcess(tmp_path, **disk) as node:
        with RawSession(node.address) as session:
            session.store(long, retention=Retention(ttl_ms=600_000))
            session.store(short, retention=Retention(ttl_ms=1_500))
            flush = cache_pb2.FlushRequest(session_id=session.session_id)
            assert session.cache.Flush(flush, timeout=TIMEOUT_S).durable_pages == 4
        expires_s = time.monotonic() + 1.5
        node.kill()
        time.sleep(max(0.0, expires_s - time.monotonic()))
        node.start()
        with RawSession(node.address) as session:
            assert session.match(short).page_count == 0
            assert session.match(long).page_count == 2
        assert statistics(node).counters["expired_pages"] == 2


def test_pins_are_bounded_and_the_put_goes_on(session: RawSession, node: NodeProcess) -> None:
    # An eighth of 16 MiB is 512 pages of 4 KiB.
    chain = chain_of("pinned", 600)
    reserved = session.reserve(chain, retention=Retention(pin_ms=60_000))
    assert reserved.unpinned_count == 88
    assert set(reserved.statuses) == {cache_pb2.STATUS_RESERVED}
    assert statistics(node).gauges["kept_pages"] == 512
    abort = cache_pb2.AbortRequest(
        session_id=session.session_id, reservation_id=reserved.reservation_id
    )
    session.cache.Abort(abort, timeout=TIMEOUT_S)
    assert statistics(node).gauges["kept_pages"] == 0

    session.store(chain)
    pinned = retain(session, chain, retention=Retention(pin_ms=60_000))
    assert pinned == [DONE] * 512 + [QUOTA_EXCEEDED] * 88
    assert statistics(node).gauges["kept_bytes"] == 2 << 20
    assert retain(session, chain, unpin=True) == [DONE] * 600
    assert statistics(node).gauges["kept_pages"] == 0
    assert retain(session, chain_of("nothing", 2), unpin=True) == [MISSING] * 2


@pytest.mark.parametrize(
    ("field", "seconds_max"), [("ttl_ms", limits.TTL_S_MAX), ("pin_ms", limits.PIN_S_MAX)]
)
def test_absurd_times_are_refused_by_name_and_not_cut(
    session: RawSession, field: str, seconds_max: int
) -> None:
    chain = chain_of(f"absurd {field}", 1)
    session.store(chain)
    for asked_ms in (seconds_max * 1000 + 1, 2**63, 2**64 - 1):
        wish = Retention(**{field: asked_ms})
        words = (f"retention.{field} is {asked_ms}", f"at most {seconds_max * 1000}")
        assert_invalid(partial(session.reserve, chain, retention=wish), *words)
        assert_invalid(partial(retain, session, chain, retention=wish), *words)
    assert retain(session, chain, retention=Retention(**{field: seconds_max * 1000})) == [DONE]
    assert retain(session, chain, unpin=True) == [DONE]


def test_hints_come_with_calls_and_alone_and_are_counted(
    session: RawSession, node: NodeProcess
) -> None:
    def heard() -> dict[str, int]:
        counters = statistics(node).counters
        return {name: counters[f"hints_{name}"] for name in ("ongoing", "pause", "tool_call")}

    before, chain = heard(), chain_of("hints", 1)
    session.reserve(chain, hint=SessionHint(conversation="c"), reservation_ms=1)
    session.match(chain, hint=SessionHint(conversation="c", kind=PAUSE, pause_ms=30_000))
    session.fetch(chain, hint=SessionHint(conversation="c"))
    hint = SessionHint(conversation="c", kind=TOOL_CALL)
    request = cache_pb2.HintRequest(session_id=session.session_id, hint=hint)
    session.cache.Hint(request, timeout=TIMEOUT_S)
    after = heard()
    assert {name: after[name] - before[name] for name in after} == {
        "ongoing": 2,
        "pause": 1,
        "tool_call": 1,
    }
    assert statistics(node).gauges["waiting_conversations"] == 1
    request.hint.kind = ENDED
    session.cache.Hint(request, timeout=TIMEOUT_S)
    assert statistics(node).gauges["conversations"] == 0


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (SessionHint(), "hint.conversation has 0 bytes"),
        (SessionHint(conversation="ü" * 129), "hint.conversation has 258 bytes"),
        (
            SessionHint(conversation="c", kind=ENDED, pause_ms=5),
            "hint.pause_ms is 5",
        ),
        (
            SessionHint(conversation="c", kind=PAUSE, pause_ms=2**64 - 1),
            f"hint.pause_ms is {2**64 - 1}",
        ),
    ],
)
def test_senseless_hints_are_refused_by_name(
    session: RawSession, hint: cache_pb2.SessionHint, words: str
) -> None:
    chain = chain_of("senseless", 1)
    request = cache_pb2.HintRequest(session_id=session.session_id, hint=hint)
    calls: list[Callable[[], Any]] = [
        lambda: session.cache.Hint(request, timeout=TIMEOUT_S),
        lambda: session.match(chain, hint=hint),
        lambda: list(session.get(chain, hint=hint)),
        lambda: session.reserve(chain, hint=hint),
    ]
    for call in calls:
        assert_invalid(call, words)


def test_a_kind_of_hint_that_nobody_knows_yet_is_no_error(session: RawSession) -> None:
    hint = SessionHint(conversation="c", kind=77)  # type: ignore[arg-type]
    request = cache_pb2.HintRequest(session_id=session.session_id, hint=hint)
    session.cache.Hint(request, timeout=TIMEOUT_S)
