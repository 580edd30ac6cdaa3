"""A worker process that says where it is, then waits to be killed, stopped or let on.

``python -m tests.integration.stalling_worker ADDRESS ROLE SEED``: prints ``ready`` at the moment
that its role is about, then waits for a line on stdin, goes on, and prints what it was answered.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from tests.integration.raw import (
    HALVES,
    UNIT_BYTES,
    RawSession,
    chain_of,
    content_of,
    u8,
    u32,
    u64,
)

import octavo
from octavo_proto.v1 import cache_pb2

PAGES: Final = 4
UNITS: Final = 2


def pause() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def tell(values: object) -> None:
    print(*np.asarray(values).tolist() if not isinstance(values, str) else [values], flush=True)


def put(address: str, seed: str) -> None:
    """Commits page 0 and half of page 1, stops with the rest in the ring, commits it later."""
    chain = chain_of(seed, PAGES, layout=1)
    with RawSession(address, attach=True) as session:
        reserved = session.reserve(chain)
        for row in range(PAGES * UNITS):
            page, unit = divmod(row, UNITS)
            content = content_of(chain.keys[page * 16 :][:16], unit)
            session.ring_write(row * UNIT_BYTES, content)

        def commit(rows: range) -> list[int]:
            return session.commit(
                reserved.reservation_id,
                positions=u32(*[row // UNITS for row in rows]),
                units=u8(*[row % UNITS for row in rows]),
                ring_offsets=u64(*[row * UNIT_BYTES for row in rows]),
                lengths=u32(*[UNIT_BYTES] * len(rows)),
            )

        assert set(commit(range(3))) == {cache_pb2.STATUS_STORED}
        pause()
        tell(commit(range(3, PAGES * UNITS)))


def put_inline(address: str, seed: str) -> None:
    """Sends a page and a half, stops in the middle of a unit, and goes on later."""
    chain = chain_of(seed, PAGES, layout=1)

    def pieces(session: RawSession, reservation_id: int) -> Iterator[cache_pb2.PutRequest]:
        header = cache_pb2.PutHeader(session_id=session.session_id, reservation_id=reservation_id)
        yield cache_pb2.PutRequest(header=header)
        for row in range(PAGES * UNITS):
            page, unit = divmod(row, UNITS)
            content = content_of(chain.keys[page * 16 :][:16], unit)
            half = UNIT_BYTES // 2
            for begin in (0, half):
                if (row, begin) == (3, half):
                    pause()
                piece = cache_pb2.PutData(
                    position=page, unit=unit, offset=begin, data=content[begin : begin + half]
                )
                yield cache_pb2.PutRequest(data=piece)

    with RawSession(address) as session:
        reserved = session.reserve(chain)
        answer = session.cache.Put(pieces(session, reserved.reservation_id), timeout=30)
        tell(list(answer.statuses))


def get(address: str, seed: str) -> None:
    """Is granted a lease and a hold, stops, and releases them later."""
    chain = chain_of(seed, PAGES, layout=1)
    with RawSession(address, attach=True) as session:
        hold_id = session.match(chain, hold=True).hold_id
        grants = next(session.get(chain, delivery=cache_pb2.DELIVERY_GRANTS)).grants
        pause()
        tell(session.release(grants.lease_id, hold_ids=[hold_id]))


def get_inline(address: str, seed: str) -> None:
    """Reads one message of a long inline get, stops, and reads the rest later."""
    chain = chain_of(seed, 256, layout=1)
    keys = [chain.keys[begin : begin + 16] for begin in range(0, len(chain.keys), 16)]
    with RawSession(address) as session:
        stream = session.get(chain)
        responses: list[cache_pb2.GetResponse] = [next(stream)]
        pause()
        responses.extend(stream)
    for response in responses:
        if response.HasField("data"):
            data = response.data
            assert data.data == content_of(keys[data.position], data.unit), "a wrong page"
    tell(list(responses[-1].outcome.statuses))


class _SlowSink:
    """Stops in the middle of a copy, when the first unit lies half in the buffer."""

    def __init__(self) -> None:
        self.first = True

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        half = bytes(view[: len(view) // 2])
        if self.first:
            self.first = False
            pause()
        assert len(half + bytes(view[len(view) // 2 :])) == UNIT_BYTES


def client_get(address: str, seed: str) -> None:
    """The client's own get: what it copied under a lease that ran out must not count."""
    with octavo.Client(address, layouts=[HALVES], transport="shm", timeout_s=30) as client:
        chain = client.chain(tokens_of(seed))
        tell([int(status) for status in client.get(chain, _SlowSink()).statuses])


def waiting_get(address: str, seed: str) -> None:
    """Waits in a get for pages that another session is writing."""
    chain = chain_of(seed, PAGES, layout=1)
    with RawSession(address, attach=True) as session:
        stream = session.get(chain, delivery=cache_pb2.DELIVERY_GRANTS, wait_pending=True)
        reader = threading.Thread(target=lambda: list(stream), daemon=True)
        reader.start()
        pause()


def tokens_of(seed: str) -> range:
    """Tokens of PAGES pages that no other seed has."""
    begin = int.from_bytes(seed.encode()[-3:], "little") * 100
    return range(begin, begin + PAGES * HALVES.page_tokens)


ROLES: Final[dict[str, Callable[[str, str], None]]] = {
    "put": put,
    "put_inline": put_inline,
    "get": get,
    "get_inline": get_inline,
    "client_get": client_get,
    "waiting_get": waiting_get,
}

if __name__ == "__main__":
    ROLES[sys.argv[2]](sys.argv[1], sys.argv[3])
