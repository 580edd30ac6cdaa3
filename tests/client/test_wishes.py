"""Times to live, pins and hints as the client says them, on a real node."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.client.contract import LAYOUT, UNIT, client_of, content, prompt
from tests.nodes import NodeProcess

import octavo
from octavo import InvalidRequest, SessionHint, Status


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory: Path = tmp_path_factory.mktemp("node")
    with NodeProcess(directory, memory_bytes="16MiB", staging_ring_bytes="1MiB") as process:
        yield process


@pytest.fixture(params=["shm", "grpc"])
def client(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[octavo.Client]:
    with client_of(node.address, request.param) as made:
        made.connect()
        made.clear()
        yield made


def source(seed: int, pages: int) -> octavo.BufferSource:
    return octavo.BufferSource(content(seed, pages), UNIT)


def as_an_old_node(client: octavo.Client) -> None:
    """What a node of before says it can do."""
    session = client._connection.session_if_open  # pyright: ignore[reportPrivateUsage]
    assert session is not None
    session.node = replace(session.node, features=("shm", "inline"))


def test_pages_that_were_put_for_a_time_are_gone_after_it(client: octavo.Client) -> None:
    chain = client.chain(prompt(1, 4))
    begin_s = time.monotonic()
    assert client.put(chain, source(1, 4), ttl_s=0.5).stored_pages == 4
    while client.match(chain).page_count == 4:
        assert time.monotonic() < begin_s + 5
        time.sleep(0.01)
    assert time.monotonic() - begin_s >= 0.5
    assert client.match(chain).page_count == 0
    assert client.put(chain, source(1, 4)).stored_pages == 4


def test_retain_prolongs_and_pins_what_is_there(client: octavo.Client) -> None:
    chain = client.chain(prompt(2, 6))
    client.put(chain, source(2, 6), page_count=4, ttl_s=1.0)
    begin_s = time.monotonic()
    there, missing = [Status.DONE] * 4, [Status.MISSING] * 2
    assert client.retain(chain, ttl_s=60.0, pin_s=60.0) == there + missing
    assert client.statistics().gauges["kept_pages"] == 4
    assert client.retain(chain, unpin=True) == there + missing
    assert client.statistics().gauges["kept_pages"] == 0
    time.sleep(max(0.0, begin_s + 1.1 - time.monotonic()))
    assert client.match(chain).page_count == 4
    assert client.retain(client.chain()) == []


def test_a_put_says_which_pages_found_no_room_for_their_pin(client: octavo.Client) -> None:
    # An eighth of 16 MiB has room for 128 pages of 16 KiB. The ring takes 64 at a time.
    chain = client.chain(prompt(3, 130))
    result = client.put(chain, source(3, 130), pin_s=60.0)
    assert (result.stored_pages, result.unpinned_pages) == (130, 2)
    again = client.retain(chain, pin_s=60.0)
    assert again == [Status.DONE] * 128 + [Status.QUOTA_EXCEEDED] * 2
    client.retain(chain, unpin=True)
    assert client.put(chain, source(3, 130)).unpinned_pages == 0


def test_hints_come_with_every_call_and_alone(client: octavo.Client) -> None:
    def heard() -> dict[str, int]:
        counters = client.statistics().counters
        return {name: counters[name] for name in counters if name.startswith("hints_")}

    before = heard()
    chain = client.chain(prompt(4, 2))
    client.put(chain, source(4, 2), hint=SessionHint("c"))
    client.match(chain, hint=SessionHint("c", tool_call=True))
    sink = octavo.BufferSink(bytearray(2 * LAYOUT.unit_count * UNIT), UNIT)
    client.get(chain, sink, hint=SessionHint("c", pause_s=30))
    assert client.hint(SessionHint("c", ended=True), chain)
    assert client.hint(SessionHint("c"), namespace="default")
    after = heard()
    assert {name: after[name] - before[name] for name in after} == {
        "hints_ongoing": 2,
        "hints_ended": 1,
        "hints_pause": 1,
        "hints_tool_call": 1,
    }


def test_the_asyncio_client_retains_and_hints_too(node: NodeProcess) -> None:
    async def test() -> None:
        async with octavo.AsyncClient(node.address, layouts=[LAYOUT]) as client:
            chain = client.chain(prompt(5, 2))
            await client.put(chain, source(5, 2), ttl_s=60.0)
            assert await client.retain(chain, pin_s=1.0) == [Status.DONE] * 2
            assert await client.hint(SessionHint("c"), chain)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"ttl_s": 0}, "ttl_s is 0"),
        ({"ttl_s": -1.5}, "ttl_s is -1.5"),
        ({"ttl_s": math.nan}, "ttl_s is nan"),
        ({"ttl_s": 367 * 86_400}, "up to 31622400"),
        ({"pin_s": 86_401}, "up to 86400"),
        ({"pin_s": math.inf}, "pin_s is inf"),
    ],
)
def test_senseless_durations_are_refused_by_name(
    node: NodeProcess, wish: dict[str, float], words: str
) -> None:
    with client_of(node.address, "grpc") as client:
        chain = client.chain(prompt(6, 1))
        with pytest.raises(InvalidRequest, match=words):
            client.put(chain, source(6, 1), ttl_s=wish.get("ttl_s"), pin_s=wish.get("pin_s"))
        with pytest.raises(InvalidRequest, match=words):
            client.retain(chain, ttl_s=wish.get("ttl_s"), pin_s=wish.get("pin_s"))
        assert client.match(chain).page_count == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"conversation": ""}, "conversation has 0 bytes"),
        ({"conversation": "ü" * 129}, "conversation has 258 bytes"),
        ({"conversation": "\ud800"}, "no text that UTF-8"),
        ({"conversation": "c", "ended": True, "tool_call": True}, "one of ended"),
        ({"conversation": "c", "pause_s": -1}, "pause_s is -1"),
    ],
)
def test_senseless_hints_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SessionHint(**fields)


def test_a_node_that_cannot_expire_pages_gets_none_that_should(client: octavo.Client) -> None:
    chain = client.chain(prompt(7, 2))
    as_an_old_node(client)
    with pytest.raises(InvalidRequest, match="cannot let pages expire"):
        client.put(chain, source(7, 2), ttl_s=60.0)
    assert client.match(chain).page_count == 0
    result = client.put(chain, source(7, 2), pin_s=60.0, hint=SessionHint("c"))
    assert (result.stored_pages, result.unpinned_pages) == (2, 2)
    with pytest.raises(InvalidRequest, match="neither pin nor expire"):
        client.retain(chain, pin_s=1.0)
    assert not client.hint(SessionHint("c"), chain)


def test_without_a_node_hints_are_lost_and_wishes_raise(tmp_path: Path) -> None:
    with client_of(f"unix:{tmp_path}/none.sock", "grpc", timeout_s=0.2) as client:
        assert not client.hint(SessionHint("c"))
        assert client.health.counters["miss_hint_unavailable"] == 1
        with pytest.raises(octavo.NodeUnavailable):
            client.retain(client.chain(prompt(8, 1)), pin_s=1.0)
