"""Strategies: requests of every RPC, valid ones, senseless ones, and valid ones gone wrong.

Ids and session ids stand for themselves as small numbers here (``Ref``); whoever sends a request
puts in those that the node gave out meanwhile, so that most requests mean something.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st
from tests.integration.raw import HALVES, LAYOUT, UNIT_BYTES, keys_of, u8, u16, u32, u64

from octavo_proto.v1 import cache_pb2

LARGE_BYTES: Final = 16 * UNIT_BYTES
NAMESPACES: Final = ("default", "other")
KEYS: Final = [keys_of("fuzz", 64)[begin : begin + 16] for begin in range(0, 64 * 16, 16)]

METHODS: Final[dict[str, tuple[str, Any]]] = {
    "OpenSession": ("unary_unary", cache_pb2.OpenSessionRequest),
    "CloseSession": ("unary_unary", cache_pb2.CloseSessionRequest),
    "Match": ("unary_unary", cache_pb2.MatchRequest),
    "Get": ("unary_stream", cache_pb2.GetRequest),
    "Release": ("unary_unary", cache_pb2.ReleaseRequest),
    "Renew": ("unary_unary", cache_pb2.RenewRequest),
    "Reserve": ("unary_unary", cache_pb2.ReserveRequest),
    "Commit": ("unary_unary", cache_pb2.CommitRequest),
    "Put": ("stream_unary", cache_pb2.PutRequest),
    "Abort": ("unary_unary", cache_pb2.AbortRequest),
    "Retain": ("unary_unary", cache_pb2.RetainRequest),
    "Hint": ("unary_unary", cache_pb2.HintRequest),
    "IssueBulkTicket": ("unary_unary", cache_pb2.IssueBulkTicketRequest),
    "Delete": ("unary_unary", cache_pb2.DeleteRequest),
    "Clear": ("unary_unary", cache_pb2.ClearRequest),
    "Flush": ("unary_unary", cache_pb2.FlushRequest),
}
"""Of the Cache service: how gRPC calls it, and its request."""

SESSION_REFS: Final = [bytes([number]) for number in range(3)]
"""Stand for the sessions that the fuzzer has open."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One call: method and the messages that it sends, serialised."""

    method: str
    messages: tuple[bytes, ...]


sizes = st.sampled_from([0, 1, 2, 3, 7, 15, 16, 17, 100, 2**16, 2**31, 2**32 - 1])
huge = st.sampled_from([0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - UNIT_BYTES, 2**64 - 1])
session_ids = st.sampled_from([*SESSION_REFS * 6, b"", b"x" * 16, b"y" * 17])
numbers = st.one_of(st.integers(0, 8), st.integers(0, 8), huge)
"""Ids: small ones stand for the latest that the node gave out."""


@st.composite
def chains(draw: st.DrawFn) -> cache_pb2.Chain:
    begin = draw(st.integers(0, len(KEYS) - 1))
    keys = KEYS[begin : begin + draw(st.integers(0, 8))]
    twist = draw(st.sampled_from(["none"] * 8 + ["shuffled", "twice", "cut", "random"]))
    if twist == "shuffled":
        keys = draw(st.permutations(keys))
    elif twist == "twice":
        keys = keys + keys[:1]
    column = b"".join(keys)
    if twist == "cut":
        column = column[:-3]
    elif twist == "random":
        column = draw(st.binary(max_size=64))
    parent = KEYS[begin - 1] if begin and draw(st.booleans()) else b""
    if draw(st.integers(0, 9)) == 0:
        parent = draw(st.one_of(st.sampled_from(KEYS), st.binary(max_size=17)))
    return cache_pb2.Chain(
        namespace_index=draw(st.sampled_from([0, 0, 0, 1, 2, 2**32 - 1])),
        layout_index=draw(st.sampled_from([0, 0, 0, 1, 1, 2, 2**32 - 1])),
        keys=column,
        parent_key=parent,
        unlinked=draw(st.integers(0, 4)) == 0,
    )


@st.composite
def _clean_chains(draw: st.DrawFn) -> cache_pb2.Chain:
    layout = draw(st.integers(0, 1))
    pool = KEYS[layout * 32 : (layout + 1) * 32]  # honest keys depend on their layout
    begin, count = draw(st.sampled_from([0, 0, 0, 4, 8, 16, 24])), draw(st.integers(1, 8))
    return cache_pb2.Chain(
        namespace_index=draw(st.integers(0, 1)),
        layout_index=layout,
        keys=b"".join(pool[begin : begin + count]),
        parent_key=pool[begin - 1] if begin else b"",
    )


masks = st.one_of(st.just(0), st.integers(0, 3), huge)
few = st.integers(0, 5)


@st.composite
def columns_of(draw: st.DrawFn, pack: Any, values: st.SearchStrategy[int]) -> bytes:
    if draw(st.integers(0, 11)) == 0:
        return draw(st.binary(max_size=20))
    return bytes(pack(*draw(st.lists(values, max_size=4))))


@st.composite
def commits(draw: st.DrawFn) -> cache_pb2.CommitRequest:
    count = draw(st.integers(0, 6))
    request = cache_pb2.CommitRequest(
        session_id=draw(session_ids), reservation_id=draw(numbers), last=draw(st.booleans())
    )
    request.positions = u32(*range(count))
    request.units = u8(*[draw(st.sampled_from([0, 0, 1])) for _ in range(count)])
    request.ring_offsets = u64(*[page * UNIT_BYTES for page in range(count)])
    request.lengths = u32(*[UNIT_BYTES] * count)
    if draw(st.integers(0, 2)) == 0:
        column = draw(st.sampled_from(["positions", "units", "ring_offsets", "lengths"]))
        values = {"positions": sizes, "units": st.integers(0, 255), "lengths": sizes}
        pack = {"positions": u32, "units": u8, "ring_offsets": u64, "lengths": u32}[column]
        setattr(request, column, draw(columns_of(pack, values.get(column, huge))))
    return request


# Times to live of milliseconds end within the test, those of minutes do not.
retentions = st.builds(
    cache_pb2.Retention,
    ttl_ms=st.one_of(st.sampled_from([0, 0, 1, 50, 60_000]), huge),
    pin_ms=st.one_of(st.sampled_from([0, 0, 1, 50, 60_000]), huge),
)
hints = st.builds(
    cache_pb2.SessionHint,
    conversation=st.sampled_from(["a", "a", "b", "", "x" * 300]),
    kind=st.sampled_from([0, 1, 2, 2, 3, 99]),
    pause_ms=st.one_of(st.just(0), st.just(1000), huge),
)
# A field that is left out is left out by None.
maybe_retentions = st.one_of(st.none(), st.none(), retentions)
maybe_hints = st.one_of(st.none(), st.none(), st.none(), hints)


@st.composite
def layouts(draw: st.DrawFn) -> cache_pb2.Layout:
    message = draw(st.sampled_from([LAYOUT, HALVES])).to_proto()
    if draw(st.booleans()):
        field = draw(st.sampled_from([field.name for field in message.DESCRIPTOR.fields]))
        with suppress(TypeError, ValueError):  # of the other type: the field stays as it is
            setattr(message, field, draw(st.one_of(sizes, st.text(max_size=8))))
    return message


requests: dict[str, st.SearchStrategy[Any]] = {
    "OpenSession": st.builds(
        cache_pb2.OpenSessionRequest,
        client=st.text(max_size=10),
        namespaces=st.lists(st.sampled_from([*NAMESPACES, "", "x" * 300]), max_size=3),
        layouts=st.lists(layouts(), max_size=3),
        layout_fingerprints=st.one_of(st.just(b""), st.binary(max_size=40)),
        variants=st.lists(st.sampled_from([0, 1, 2, 2**16]), max_size=3),
        want_shared_memory=st.booleans(),
    ),
    "CloseSession": st.builds(cache_pb2.CloseSessionRequest, session_id=session_ids),
    "Match": st.builds(
        cache_pb2.MatchRequest,
        session_id=session_ids,
        chain=chains(),
        hold=st.booleans(),
        hold_ms=sizes,
        hint=maybe_hints,
    ),
    "Get": st.builds(
        cache_pb2.GetRequest,
        session_id=session_ids,
        chain=chains(),
        hold_id=st.one_of(st.just(0), numbers),
        first_position=st.one_of(st.just(0), sizes),
        unit_mask=masks,
        delivery=st.sampled_from([1, 2, 2, 2, 3, 0, 4]),
        lease_ms=sizes,
        wait_pending=st.booleans(),
        wait_ms=st.sampled_from([1, 20]),  # longer ones would only make the test longer
        hint=maybe_hints,
    ),
    "Release": st.builds(
        cache_pb2.ReleaseRequest,
        session_id=session_ids,
        lease_ids=columns_of(u64, numbers),
        hold_ids=columns_of(u64, numbers),
    ),
    "Renew": st.builds(
        cache_pb2.RenewRequest,
        session_id=session_ids,
        lease_ids=columns_of(u64, numbers),
        hold_ids=columns_of(u64, numbers),
        reservation_ids=columns_of(u64, numbers),
        duration_ms=sizes,
    ),
    "Reserve": st.builds(
        cache_pb2.ReserveRequest,
        session_id=session_ids,
        chain=chains(),
        unit_mask=masks,
        unit_lengths=st.one_of(st.just(u32(UNIT_BYTES)), columns_of(u32, sizes)),
        variants=st.one_of(st.just(u16(1)), st.just(u16(2)), columns_of(u16, few)),
        reservation_ms=sizes,
        retention=maybe_retentions,
        hint=maybe_hints,
    ),
    "Commit": commits(),
    "Abort": st.builds(cache_pb2.AbortRequest, session_id=session_ids, reservation_id=numbers),
    "Retain": st.builds(
        cache_pb2.RetainRequest,
        session_id=session_ids,
        chain=chains(),
        retention=maybe_retentions,
        unpin=st.booleans(),
    ),
    "Hint": st.builds(
        cache_pb2.HintRequest,
        session_id=session_ids,
        chain=chains(),
        hint=st.one_of(hints, hints, hints, st.none()),
    ),
    "IssueBulkTicket": st.builds(cache_pb2.IssueBulkTicketRequest, session_id=session_ids),
    "Delete": st.builds(cache_pb2.DeleteRequest, session_id=session_ids, chain=chains()),
    "Clear": st.builds(
        cache_pb2.ClearRequest,
        session_id=session_ids,
        namespace_index=st.sampled_from([0, 1, 1, 2, 2**32 - 1]),
        layout_fingerprint=st.sampled_from(
            [b"", LAYOUT.fingerprint(), LAYOUT.fingerprint(), b"f" * 16, b"short"]
        ),
    ),
    "Flush": st.builds(cache_pb2.FlushRequest, session_id=session_ids),
}

_pieces = st.builds(
    cache_pb2.PutData,
    position=st.one_of(few, sizes),
    unit=st.one_of(st.integers(0, 1), sizes),
    offset=st.one_of(st.just(0), st.just(UNIT_BYTES // 2), sizes),
    data=st.sampled_from([b"", b"x", b"h" * (UNIT_BYTES // 2), b"w" * UNIT_BYTES]),
)
_headers = st.builds(
    cache_pb2.PutHeader, session_id=session_ids, reservation_id=numbers, last=st.booleans()
)
_put_parts = st.one_of(
    st.builds(cache_pb2.PutRequest, data=_pieces),
    st.builds(cache_pb2.PutRequest, data=_pieces),
    st.builds(cache_pb2.PutRequest, header=_headers),
)


@st.composite
def _puts(draw: st.DrawFn) -> list[Any]:
    messages = draw(st.lists(_put_parts, max_size=5))
    if draw(st.integers(0, 9)):
        messages.insert(0, cache_pb2.PutRequest(header=draw(_headers)))
    return messages


@st.composite
def _gone_wrong(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of a valid message with some of them changed, lost or doubled."""
    place = draw(st.integers(0, max(0, len(data) - 1)))
    how = draw(st.sampled_from(["change", "lose", "double", "end"]))
    if how == "change" and data:
        return data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
    if how == "lose":
        return data[:place] + data[place + 1 :]
    if how == "double":
        return data[:place] + data[place:] * 2
    return data[:place]


@st.composite
def _any_call(draw: st.DrawFn) -> list[Sent]:
    method = draw(st.sampled_from([*METHODS]))
    messages = draw(_puts()) if method == "Put" else [draw(requests[method])]
    return [sent(method, *messages)]


@st.composite
def _stores(draw: st.DrawFn) -> list[Sent]:
    """A put as a worker does it: reserve, then commit or send, by the latest id."""
    chain, session_id = draw(_clean_chains()), draw(st.sampled_from(SESSION_REFS))
    length = draw(st.sampled_from([UNIT_BYTES, UNIT_BYTES, LARGE_BYTES]))
    count, unit_count = len(chain.keys) // 16, chain.layout_index + 1
    rows = [(page, unit) for page in range(count) for unit in range(unit_count)]
    reserve = cache_pb2.ReserveRequest(
        session_id=session_id, chain=chain, unit_lengths=u32(length), variants=u16(1)
    )
    if session_id != SESSION_REFS[2] and draw(st.booleans()):
        commit = cache_pb2.CommitRequest(
            session_id=session_id,
            reservation_id=1,
            positions=u32(*[page for page, _ in rows]),
            units=u8(*[unit for _, unit in rows]),
            ring_offsets=u64(*[place * length for place in range(len(rows))]),
            lengths=u32(*[length] * len(rows)),
            last=draw(st.booleans()),
        )
        return [sent("Reserve", reserve), sent("Commit", commit)]
    header = cache_pb2.PutHeader(session_id=session_id, reservation_id=1, last=True)
    parts = [
        cache_pb2.PutRequest(data=cache_pb2.PutData(position=page, unit=unit, data=b"p" * length))
        for page, unit in rows
    ]
    return [sent("Reserve", reserve), sent("Put", cache_pb2.PutRequest(header=header), *parts)]


@st.composite
def _reads(draw: st.DrawFn) -> list[Sent]:
    """A get as a worker does it, with or without a hold; the lease may stay."""
    chain, session_id = draw(_clean_chains()), draw(st.sampled_from(SESSION_REFS))
    hold = draw(st.booleans())
    match = cache_pb2.MatchRequest(session_id=session_id, chain=chain, hold=hold)
    get = cache_pb2.GetRequest(session_id=session_id, chain=chain, hold_id=int(hold), wait_ms=50)
    get.delivery = cache_pb2.DELIVERY_INLINE
    if session_id != SESSION_REFS[2] and draw(st.booleans()):
        get.delivery = cache_pb2.DELIVERY_GRANTS
    release = cache_pb2.ReleaseRequest(session_id=session_id, lease_ids=u64(1))
    story = [sent("Match", match), sent("Get", get), sent("Release", release)]
    return story[: draw(st.integers(1, 3))]


@st.composite
def _removals(draw: st.DrawFn) -> list[Sent]:
    chain, session_id = draw(_clean_chains()), draw(st.sampled_from(SESSION_REFS))
    if draw(st.booleans()):
        return [sent("Delete", cache_pb2.DeleteRequest(session_id=session_id, chain=chain))]
    clear = cache_pb2.ClearRequest(
        session_id=session_id,
        namespace_index=chain.namespace_index,
        layout_fingerprint=draw(st.sampled_from([b"", HALVES.fingerprint()])),
    )
    return [sent("Clear", clear)]


def sent(method: str, *messages: Any) -> Sent:
    return Sent(method, tuple(message.SerializeToString() for message in messages))


@st.composite
def stories(draw: st.DrawFn) -> list[Sent]:
    """One call, or some that belong together; now and then a message of them is spoilt."""
    kind = st.sampled_from([_any_call()] * 4 + [_stores()] * 3 + [_reads()] * 2 + [_removals()])
    story = draw(draw(kind))
    fate = draw(st.sampled_from(["valid"] * 7 + ["mutated", "mutated", "random"]))
    place = draw(st.integers(0, len(story) - 1))
    messages = list(story[place].messages)
    if fate != "valid" and messages:
        which = draw(st.integers(0, len(messages) - 1))
        spoilt = _gone_wrong(messages[which]) if fate == "mutated" else st.binary(max_size=200)
        messages[which] = draw(spoilt)
    story[place] = Sent(story[place].method, tuple(messages))
    return story
