"""What the client raises, and how gRPC's errors become it.

OctavoError
├── NodeUnavailable      no answer to be had: `match`, `get` and `put` turn it into misses
│   ├── ConnectError     nobody listens at the address, or the connection broke
│   │   └── SessionLost  the node no longer knows the session (it was restarted, perhaps)
│   ├── NodeTimeout      no answer within the deadline
│   ├── NodeBusy         one of the node's bounds is reached
│   └── NodeFailed       the node answered that it failed
├── SessionRefused       a layout, namespace or credential does not agree: always raised
├── InvalidRequest       the call contradicts itself or the node's limits (a ValueError too)
├── TransferError        a sink or source broke its promise
├── CallCancelled        the asyncio task that made the call was cancelled
└── ClientClosed         the client was closed before the call
"""

from __future__ import annotations

from typing import Final

import grpc


class OctavoError(Exception):
    """Base of everything that the client raises on purpose."""


class NodeUnavailable(OctavoError):  # noqa: N818 - says what happened
    """No answer to be had now. A cache that cannot answer is a miss."""


class ConnectError(NodeUnavailable):
    """Nobody listens at the address, or the connection broke."""


class SessionLost(ConnectError):  # noqa: N818 - says what happened
    """The node does not know the session, or the session's memory was withdrawn."""


class NodeTimeout(NodeUnavailable):
    """The node did not answer within the deadline."""


class NodeBusy(NodeUnavailable):
    """The node reached one of its bounds. It is well, so this does not trip the breaker."""


class NodeFailed(NodeUnavailable):
    """The node answered that it failed."""


class SessionRefused(OctavoError):  # noqa: N818 - says what happened
    """The node refuses the session; the message says which setting differs."""


class InvalidRequest(OctavoError, ValueError):  # noqa: N818 - says what happened
    """The call contradicts itself, its layout or the node's limits."""


class TransferError(OctavoError):
    """A sink or source broke its promise; the message says which."""


class CallCancelled(OctavoError):  # noqa: N818 - says what happened
    """The call was cancelled from outside."""


class ClientClosed(OctavoError):  # noqa: N818 - says what happened
    """The client is closed."""


UNKNOWN_SESSION: Final = "unknown session"
"""Start of the node's message when it does not know the session."""

_BY_CODE: Final[dict[grpc.StatusCode, type[OctavoError]]] = {
    grpc.StatusCode.CANCELLED: SessionLost,  # our own channel was closed under the call
    grpc.StatusCode.UNKNOWN: NodeFailed,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: NodeTimeout,
    grpc.StatusCode.NOT_FOUND: NodeFailed,
    grpc.StatusCode.ALREADY_EXISTS: NodeFailed,
    grpc.StatusCode.PERMISSION_DENIED: SessionRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NodeBusy,
    grpc.StatusCode.FAILED_PRECONDITION: SessionRefused,
    grpc.StatusCode.ABORTED: NodeFailed,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: NodeFailed,
    grpc.StatusCode.INTERNAL: NodeFailed,
    grpc.StatusCode.UNAVAILABLE: ConnectError,
    grpc.StatusCode.DATA_LOSS: NodeFailed,
    grpc.StatusCode.UNAUTHENTICATED: SessionRefused,
}


def error_of(code: grpc.StatusCode, details: str) -> OctavoError:
    """The client's error for a gRPC status. Every code has one."""
    session_codes = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.NOT_FOUND)
    if code in session_codes and details.lower().startswith(UNKNOWN_SESSION):
        return SessionLost(details)
    return _BY_CODE.get(code, NodeFailed)(details or code.name)
