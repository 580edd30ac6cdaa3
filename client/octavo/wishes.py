"""What a call may wish for its pages, and tell of the conversation that it serves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from octavo.errors import InvalidRequest
from octavo.results import NodeInfo
from octavo_proto.limits import CONVERSATION_BYTES_MAX, PAUSE_S_MAX, PIN_S_MAX, TTL_S_MAX
from octavo_proto.v1 import cache_pb2

RETENTION_FEATURE: Final = "retention"
"""Of nodes that let pages expire and pin them."""

HINTS_FEATURE: Final = "hints"
"""Of nodes that hear hints."""


@dataclass(frozen=True, slots=True)
class SessionHint:
    """What is known of a conversation: at most one of ``ended``, ``pause_s`` and ``tool_call``;
    none of them says that it goes on.

    Raises:
        InvalidRequest: several of them, no name or a name too long, or a senseless pause.
    """

    conversation: str
    """The application's name for it, within the namespace; at most 256 bytes of UTF-8."""
    ended: bool = False
    """Nothing more will come."""
    pause_s: float | None = None
    """It pauses for about so long."""
    tool_call: bool = False
    """It waits for a tool."""

    def __post_init__(self) -> None:
        try:
            name_bytes = len(self.conversation.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("conversation is no text that UTF-8 can hold") from None
        if not 0 < name_bytes <= CONVERSATION_BYTES_MAX:
            raise InvalidRequest(
                f"conversation has {name_bytes} bytes, allowed: 1 to {CONVERSATION_BYTES_MAX}"
            )
        if self.ended + (self.pause_s is not None) + self.tool_call > 1:
            raise InvalidRequest("a hint says one of ended, pause_s and tool_call")
        if self.pause_s is not None:
            milliseconds("pause_s", self.pause_s, PAUSE_S_MAX)

    def message(self) -> cache_pb2.SessionHint:
        """The protocol's message for it."""
        kind = cache_pb2.HINT_KIND_UNSPECIFIED
        if self.ended:
            kind = cache_pb2.HINT_KIND_ENDED
        elif self.pause_s is not None:
            kind = cache_pb2.HINT_KIND_PAUSE
        elif self.tool_call:
            kind = cache_pb2.HINT_KIND_TOOL_CALL
        pause_ms = 0 if self.pause_s is None else milliseconds("pause_s", self.pause_s, PAUSE_S_MAX)
        return cache_pb2.SessionHint(conversation=self.conversation, kind=kind, pause_ms=pause_ms)


def hint_message(hint: SessionHint | None) -> cache_pb2.SessionHint | None:
    return None if hint is None else hint.message()


def retention_message(ttl_s: float | None, pin_s: float | None) -> cache_pb2.Retention | None:
    """The protocol's message for times to live and pins; None for no wish.

    Raises:
        InvalidRequest: a duration that is not above 0, or beyond what the protocol allows.
    """
    if ttl_s is None and pin_s is None:
        return None
    return cache_pb2.Retention(
        ttl_ms=0 if ttl_s is None else milliseconds("ttl_s", ttl_s, TTL_S_MAX),
        pin_ms=0 if pin_s is None else milliseconds("pin_s", pin_s, PIN_S_MAX),
    )


def retention_for(
    node: NodeInfo, wish: cache_pb2.Retention | None
) -> tuple[cache_pb2.Retention | None, bool]:
    """What is said of a wish to this node, and whether its pins can be kept there.

    Raises:
        InvalidRequest: pages are to expire, and the node would keep them.
    """
    if wish is None or RETENTION_FEATURE in node.features:
        return wish, True
    if wish.ttl_ms:
        raise InvalidRequest(f"node {node.server} cannot let pages expire")
    return None, False


def milliseconds(name: str, seconds: float, seconds_max: int) -> int:
    """A duration for the wire, in whole milliseconds.

    Raises:
        InvalidRequest: it is no number above 0, or above ``seconds_max``.
    """
    if not (math.isfinite(seconds) and 0 < seconds <= seconds_max):
        raise InvalidRequest(f"{name} is {seconds}, allowed: above 0, up to {seconds_max}")
    return max(1, round(seconds * 1000))
