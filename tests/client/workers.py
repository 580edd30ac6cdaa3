"""Workers that tests run as processes of their own: ``workers MODE ADDRESS TRANSPORT``."""

from __future__ import annotations

import os
import sys
import time

from tests.client.contract import (
    UNIT,
    arena_mappings,
    buffer_for,
    client_of,
    content,
    prompt,
    sink_for,
    stored_prompt,
)
from tests.client.movers import FailingSource

import octavo
from octavo import Status


class _Stalled(FailingSource):
    """Begins to fill, and never ends."""

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        time.sleep(60)
        return None


def stall(client: octavo.Client) -> None:
    """Is killed in the middle of a put."""
    client.put(client.chain(prompt(9, 4)), _Stalled())


def stall_in_turn(client: octavo.Client) -> None:
    """Puts page 1 of six, and is killed while it puts its other turns, 3 and 5."""
    chain, data = client.chain(prompt(9, 6)), content(9, 6)
    client.put(chain, octavo.BufferSource(data, UNIT, rows=[1]), positions=[1])
    client.put(chain, _Stalled(), positions=[3, 5])


def fork_before(client: octavo.Client) -> None:
    """A client that has not dialled works in a forked child and in its parent."""
    chain, data = client.chain(prompt(10, 4)), content(10, 4)
    child = os.fork()
    if child == 0:
        stored = client.put(chain, octavo.BufferSource(data, UNIT)).stored_pages
        os._exit(0 if stored == 4 else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    buffer = buffer_for(4)
    assert client.get(chain, sink_for(buffer)).page_count == 4
    assert bytes(buffer) == bytes(data)


def fork_after(client: octavo.Client) -> None:
    """Once a client has dialled, a forked child's calls miss at once and say why; the parent's
    session is not disturbed."""
    chain, _ = stored_prompt(client, 10, 4)
    child = os.fork()
    if child == 0:
        missed = client.get(chain, sink_for(buffer_for(4)))
        said_why = "forked" in client.health.last_failure
        good = missed.counts == {Status.UNAVAILABLE: 4} and said_why and arena_mappings() == 0
        client.close()
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert client.get(chain, sink_for(buffer_for(4))).page_count == 4
    streams = {"bulk_streams_opened": 1} if client.transport_name == "bulk" else {}
    assert client.health.counters == {"sessions_opened": 1, **streams}


def get_on(client: octavo.Client) -> None:
    """Gets the same 2,000 pages over and over, until it is stopped or killed."""
    chain = client.chain(prompt(30, 2000))
    sink = sink_for(buffer_for(2000))
    while client.get(chain, sink).page_count == 2000:
        pass


def main(mode: str, address: str, transport: str) -> None:
    work = {
        "stall": stall,
        "get-on": get_on,
        "stall-in-turn": stall_in_turn,
        "fork-before": fork_before,
        "fork-after": fork_after,
    }[mode]
    with client_of(address, transport) as client:
        work(client)


if __name__ == "__main__":
    main(*sys.argv[1:])
