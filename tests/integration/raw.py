"""The protocol spoken by hand, for what the client would hide: raw stubs and plain columns."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import grpc
import pytest
from tests.nodes import NodeProcess

from octavo.memory import view_at
from octavo.transport.broker import BrokerLink
from octavo_proto import columns
from octavo_proto.layout import Layout
from octavo_proto.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc

UNIT_BYTES: Final = 4096
LAYOUT: Final = Layout(
    name="small", model="m", layers=2, kv_heads=2, head_dim=32, dtype="uint8", head_parts=1
)
HALVES: Final = Layout(
    name="halves", model="m", layers=4, kv_heads=2, head_dim=32, dtype="uint8", head_parts=2
)
"""Two units of UNIT_BYTES a page."""

TIMEOUT_S: Final = 10.0


def keys_of(seed: str, page_count: int) -> bytes:
    """Keys that no other seed has."""
    return b"".join(
        hashlib.blake2b(f"{seed}/{page}".encode(), digest_size=16).digest()
        for page in range(page_count)
    )


def content_of(key: bytes, unit: int = 0, length: int = UNIT_BYTES) -> bytes:
    """The bytes that a page of this key has in these tests: a got page proves itself."""
    return hashlib.shake_128(key + bytes([unit])).digest(length)


def u8(*values: int) -> bytes:
    return bytes(values)


def u16(*values: int) -> bytes:
    return columns.write(list(values), columns.U16)


def u32(*values: int) -> bytes:
    return columns.write(list(values), columns.U32)


def u64(*values: int) -> bytes:
    return columns.write(list(values), columns.U64)


class RawSession(AbstractContextManager["RawSession"]):
    """One session on a channel of its own."""

    def __init__(
        self,
        address: str,
        *,
        layouts: Sequence[Layout] = (LAYOUT, HALVES),
        attach: bool = False,
        **fields: Any,
    ) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.cache = cache_pb2_grpc.CacheStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        request = cache_pb2.OpenSessionRequest(
            client="tests",
            layouts=[layout.to_proto() for layout in layouts],
            want_shared_memory=attach,
            **fields,
        )
        self.opened = self.cache.OpenSession(request, timeout=TIMEOUT_S)
        self.session_id = self.opened.session_id
        self.link: BrokerLink | None = None
        if attach:
            self.link = BrokerLink(self.opened.shared_memory, TIMEOUT_S)

    def __exit__(self, *_exception: object) -> None:
        self.hang_up()

    def close(self) -> None:
        """As a client that says goodbye."""
        request = cache_pb2.CloseSessionRequest(session_id=self.session_id)
        self.cache.CloseSession(request, timeout=TIMEOUT_S)
        self.hang_up()

    def hang_up(self) -> None:
        """As a client that dies."""
        if self.link is not None:
            self.link.close()
            self.link = None
        self.channel.close()

    def match(self, chain: cache_pb2.Chain, **fields: Any) -> cache_pb2.MatchResponse:
        request = cache_pb2.MatchRequest(session_id=self.session_id, chain=chain, **fields)
        return self.cache.Match(request, timeout=TIMEOUT_S)

    def reserve(
        self, chain: cache_pb2.Chain, *, length: int = UNIT_BYTES, **fields: Any
    ) -> cache_pb2.ReserveResponse:
        request = cache_pb2.ReserveRequest(session_id=self.session_id, chain=chain)
        request.unit_lengths, request.variants = u32(length), u16(1)
        request.MergeFrom(cache_pb2.ReserveRequest(**fields))
        return self.cache.Reserve(request, timeout=TIMEOUT_S)

    def put(
        self, reservation_id: int, pieces: Sequence[cache_pb2.PutData], *, last: bool = True
    ) -> cache_pb2.PutResponse:
        return self.cache.Put(self.put_messages(reservation_id, pieces, last), timeout=TIMEOUT_S)

    def put_messages(
        self, reservation_id: int, pieces: Sequence[cache_pb2.PutData], last: bool = True
    ) -> Iterator[cache_pb2.PutRequest]:
        header = cache_pb2.PutHeader(
            session_id=self.session_id, reservation_id=reservation_id, last=last
        )
        yield cache_pb2.PutRequest(header=header)
        for piece in pieces:
            yield cache_pb2.PutRequest(data=piece)

    def store(self, chain: cache_pb2.Chain, *, length: int = UNIT_BYTES, **fields: Any) -> None:
        """Puts a whole chain that is not there yet, inline. ``fields``: of its reserve."""
        reserved = self.reserve(chain, length=length, **fields)
        count = len(chain.keys) // 16
        units = len(reserved.statuses) // count
        pieces = [
            cache_pb2.PutData(position=page, unit=unit, data=content_of(key, unit, length))
            for page, key in enumerate(_keys(chain))
            for unit in range(units)
        ]
        answer = self.put(reserved.reservation_id, pieces)
        stored = answer.statuses.count(bytes([cache_pb2.STATUS_STORED]))
        assert stored == len(reserved.statuses), f"{stored} of {len(reserved.statuses)} stored"

    def get(self, chain: cache_pb2.Chain | None, **fields: Any) -> Any:
        """The stream of a get."""
        request = cache_pb2.GetRequest(session_id=self.session_id, chain=chain)
        request.delivery = cache_pb2.DELIVERY_INLINE
        request.MergeFrom(cache_pb2.GetRequest(**fields))
        return self.cache.Get(request, timeout=TIMEOUT_S)

    def fetch(self, chain: cache_pb2.Chain, **fields: Any) -> list[int]:
        """Gets a chain inline, holds each unit against its content, returns the statuses."""
        keys = _keys(chain)
        units: dict[tuple[int, int], bytearray] = {}
        for response in self.get(chain, **fields):
            if response.WhichOneof("part") == "outcome":
                for (position, unit), data in units.items():
                    assert data == content_of(keys[position], unit, len(data)), "a wrong page"
                return list(response.outcome.statuses)
            piece = response.data
            data = units.setdefault((piece.position, piece.unit), bytearray())
            assert piece.offset == len(data)
            data += piece.data
        raise AssertionError("the stream ended without an outcome")

    def release(self, *lease_ids: int, hold_ids: Sequence[int] = ()) -> list[int]:
        request = cache_pb2.ReleaseRequest(
            session_id=self.session_id, lease_ids=u64(*lease_ids), hold_ids=u64(*hold_ids)
        )
        return list(self.cache.Release(request, timeout=TIMEOUT_S).held)

    def commit(self, reservation_id: int, **fields: Any) -> list[int]:
        request = cache_pb2.CommitRequest(
            session_id=self.session_id, reservation_id=reservation_id, **fields
        )
        return list(self.cache.Commit(request, timeout=TIMEOUT_S).statuses)

    def ring_write(self, offset: int, data: bytes) -> None:
        """Writes into the staging ring."""
        assert self.link is not None
        address = self.link.mappings.ring_address + offset
        view_at(address, len(data), writable=True)[:] = data

    def arena_read(self, grants: cache_pb2.GrantBatch) -> list[bytes]:
        """Copies of the granted units, in the grant's order."""
        assert self.link is not None
        segments = columns.read("segments", grants.segments, columns.U16)
        offsets = columns.read("offsets", grants.offsets, columns.U64)
        lengths = columns.read("lengths", grants.lengths, columns.U32)
        bases = self.link.mappings.segment_addresses
        return [
            bytes(view_at(int(bases[segment]) + int(offset), int(length), writable=False))
            for segment, offset, length in zip(segments, offsets, lengths, strict=True)
        ]


def chain_of(seed: str, page_count: int, *, layout: int = 0, **fields: Any) -> cache_pb2.Chain:
    """A chain that no other seed has."""
    return cache_pb2.Chain(layout_index=layout, keys=keys_of(seed, page_count), **fields)


def _keys(chain: cache_pb2.Chain) -> list[bytes]:
    return [chain.keys[begin : begin + 16] for begin in range(0, len(chain.keys), 16)]


def statistics(node: NodeProcess) -> admin_pb2.GetStatisticsResponse:
    with grpc.insecure_channel(node.address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        return stub.GetStatistics(admin_pb2.GetStatisticsRequest(), timeout=TIMEOUT_S)


IDLE_GAUGES: Final = (
    "attached_sessions",
    "leases",
    "holds",
    "reservations",
    "reserved_bytes",
    "pinned_pages",
)


def wait_until(what: str, holds: Callable[[], object], within_s: float = 5.0) -> float:
    """Waits for ``holds`` to answer something true; how long that took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - began


def assert_nothing_held(node: NodeProcess, within_s: float = 5.0) -> None:
    """No session holds anything (any more): what a leak would show."""

    def idle() -> bool:
        gauges = statistics(node).gauges
        return not any(gauges[name] for name in IDLE_GAUGES)

    try:
        wait_until("nothing held", idle, within_s)
    except AssertionError:
        raise AssertionError(f"still held: {dict(statistics(node).gauges)}") from None


def assert_no_leaked_slots(node: NodeProcess, namespaces: Sequence[str] = ("default",)) -> None:
    """Once everything is cleared, no slot of any tier is in use."""
    with RawSession(node.address, namespaces=list(namespaces)) as session:
        for index in range(len(namespaces)):
            request = cache_pb2.ClearRequest(session_id=session.session_id, namespace_index=index)
            session.cache.Clear(request, timeout=TIMEOUT_S)
        try:
            wait_until(
                "no slot in use",
                lambda: not any(tier.used_bytes for tier in statistics(node).tiers),
            )
        except AssertionError:
            left = statistics(node)
            raise AssertionError(f"leaked: {list(left.tiers)} {dict(left.gauges)}") from None
        assert statistics(node).gauges["pages"] == 0


def assert_serves(node: NodeProcess, seed: str) -> None:
    """A put and a get, still right."""
    with RawSession(node.address) as session:
        chain = chain_of(f"healthy {seed} {time.monotonic_ns()}", 3)
        session.store(chain)
        assert session.match(chain).page_count == 3
        assert session.fetch(chain) == [cache_pb2.STATUS_DONE] * 3
        session.close()


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """Code and message with which a call fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code(), caught.value.details() or ""


def assert_invalid(call: Callable[[], Any], *words: str) -> None:
    """The call is refused as INVALID_ARGUMENT, and the message has these words."""
    code, message = refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, (code, message)
    for word in words:
        assert word in message
