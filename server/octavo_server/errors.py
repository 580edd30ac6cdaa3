"""What can go wrong with a request, and how it is answered.

    OctavoServerError
    ├── RequestError         the request contradicts itself, its session or the protocol
    ├── SessionUnknown       no such session (any more): open a new one
    ├── SessionRefusedError  the session's settings disagree with the node's
    ├── LimitReached         a bound of the node or the session is used up
    └── Unavailable          the node is draining, or lacks what the request needs

``rpc/status.py`` maps each to its gRPC status, in one table. A miss is none of these: it is an
answer.
"""


class OctavoServerError(Exception):
    """Base of all errors that a client is told of."""


class RequestError(OctavoServerError):
    """The request is wrong; the message says what about it."""


class SessionUnknown(OctavoServerError):  # noqa: N818 - reads as what it is
    """The session was closed, ran out, or belonged to an earlier life of this node."""


class SessionRefusedError(OctavoServerError):
    """The session may not be opened; the message says which setting disagrees."""


class LimitReached(OctavoServerError):  # noqa: N818
    """A bound is reached; the message names it and its value."""


class Unavailable(OctavoServerError):  # noqa: N818
    """Not now."""
