"""What requests wish for their pages and tell of their conversations, checked."""

from __future__ import annotations

from typing import Final

from octavo_proto.limits import CONVERSATION_BYTES_MAX, PAUSE_S_MAX, PIN_S_MAX, TTL_S_MAX
from octavo_proto.v1 import cache_pb2
from octavo_server.cache.hints import Conversations, Hint, HintKind
from octavo_server.cache.retaining import NO_WISH, Retention
from octavo_server.errors import RequestError

_KINDS: Final = {
    cache_pb2.HINT_KIND_UNSPECIFIED: HintKind.ONGOING,
    cache_pb2.HINT_KIND_ENDED: HintKind.ENDED,
    cache_pb2.HINT_KIND_PAUSE: HintKind.PAUSE,
    cache_pb2.HINT_KIND_TOOL_CALL: HintKind.TOOL_CALL,
}


def retention_of(request: cache_pb2.ReserveRequest | cache_pb2.RetainRequest) -> Retention:
    """The wish that a request carries.

    Raises:
        RequestError: a duration is longer than allowed. Unlike a lease's it is not cut: one that
            long is most likely in the wrong unit.
    """
    if not request.HasField("retention"):
        return NO_WISH
    wish = request.retention
    return Retention(
        ttl_s=_seconds("retention.ttl_ms", wish.ttl_ms, TTL_S_MAX),
        pin_s=_seconds("retention.pin_ms", wish.pin_ms, PIN_S_MAX),
    )


def hear(
    conversations: Conversations,
    namespace: int,
    request: cache_pb2.MatchRequest | cache_pb2.GetRequest | cache_pb2.ReserveRequest,
) -> None:
    """Takes note of the hint that a request brings along, if there is one. Raises RequestError."""
    if request.HasField("hint"):
        conversations.tell(namespace, hint_of(request.hint))


def hint_of(message: cache_pb2.SessionHint) -> Hint:
    """The hint that a message tells. A kind that is not known yet says that it goes on.

    Raises:
        RequestError: it names no conversation, or one of too many bytes, or a pause too long.
    """
    name_bytes = len(message.conversation.encode())
    if not 0 < name_bytes <= CONVERSATION_BYTES_MAX:
        raise RequestError(
            f"hint.conversation has {name_bytes} bytes, allowed: 1 to {CONVERSATION_BYTES_MAX}"
        )
    kind = _KINDS.get(message.kind, HintKind.ONGOING)
    if message.pause_ms and kind is not HintKind.PAUSE:
        raise RequestError(f"hint.pause_ms is {message.pause_ms}, and the hint is of no pause")
    return Hint(
        message.conversation, kind, _seconds("hint.pause_ms", message.pause_ms, PAUSE_S_MAX)
    )


def _seconds(name: str, asked_ms: int, limit_s: int) -> float:
    if asked_ms > limit_s * 1000:
        raise RequestError(f"{name} is {asked_ms}, at most {limit_s * 1000} allowed")
    return asked_ms / 1000
