"""What a request may say: in ``kv_transfer_params``, in vLLM's own session id and hints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, cast

from octavo.errors import InvalidRequest
from octavo.wishes import SessionHint, retention_message
from octavo_proto.limits import CONVERSATION_BYTES_MAX

PARAMS_KEY: Final = "octavo"
"""Of the object in ``kv_transfer_params``, and the type of an action in ``kv_hints``."""

HINTS_VERSION: Final = "1"
"""Of such an action. Its payload is the same object."""

_NUMBER: Final = (int, float)
REQUEST_KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "namespace": (str,),
    "load": (bool,),
    "store": (bool,),
    "tokens": (int,),
    "ttl_s": _NUMBER,
    "pin_s": _NUMBER,
    "session": (dict,),
}
SESSION_KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "id": (str,),
    "ended": (bool,),
    "pause_s": _NUMBER,
    "tool_call": (bool,),
}


class BadParams(ValueError):  # noqa: N818 - says what is wrong
    """``kv_transfer_params["octavo"]``, or a hint for Octavo, says what nobody understands."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a request wishes its pages to stay. None: for ever, and to be evicted as others."""

    ttl_s: float | None = None
    pin_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttl_s is not None or self.pin_s is not None


NO_WISH: Final = Retention()


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a request may say in ``kv_transfer_params={"octavo": {...}}``."""

    namespace: str | None = None
    """One of those that the engine's settings list."""
    load: bool = True
    store: bool = True
    tokens: int = 0
    """A producer has stored, or is about to store, so many tokens of the prompt."""
    retention: Retention = NO_WISH
    conversation: str | None = None
    """The session that it belongs to, by the application's name for it."""
    afterwards: SessionHint | None = None
    """What becomes of that session once the request has been served."""

    @classmethod
    def parse(
        cls,
        params: Mapping[str, Any] | None,
        namespaces: tuple[str, ...],
        session_id: str | None = None,
        hints: Any = None,
    ) -> Self:
        """Those of a request. ``session_id`` and ``hints`` are what vLLM itself knows; what
        ``params`` say wins.

        Raises:
            BadParams: an unknown key, a wrong type or value, or a namespace that is not listed.
        """
        values = _hinted(hints) | _object((params or {}).get(PARAMS_KEY), PARAMS_KEY)
        _check(values, REQUEST_KEYS, "")
        namespace = values.get("namespace")
        if namespace is not None and namespace not in namespaces:
            raise BadParams(f"namespace {namespace!r} is none of {', '.join(namespaces)}")
        retention = Retention(values.pop("ttl_s", None), values.pop("pin_s", None))
        session = _object(values.pop("session", None), "session")
        try:
            retention_message(retention.ttl_s, retention.pin_s)
            conversation, afterwards = _session(session, session_id)
        except InvalidRequest as error:
            raise BadParams(str(error)) from None
        return cls(**values, retention=retention, conversation=conversation, afterwards=afterwards)


def _session(
    session: dict[str, Any], session_id: str | None
) -> tuple[str | None, SessionHint | None]:
    """The conversation, and what becomes of it afterwards. Raises BadParams, InvalidRequest."""
    _check(session, SESSION_KEYS, "session.")
    stated = session.pop("id", None)
    if stated is None and session and not session_id:
        raise BadParams("session names no id, and the request has none")
    conversation = _short(session_id) if stated is None and session_id else stated
    if conversation is None:
        return None, None
    hint = SessionHint(conversation, **session)
    return conversation, None if hint == SessionHint(conversation) else hint


def _short(session_id: str) -> str:
    """vLLM bounds no session id; of one that is too long, or no text, a digest stands for it."""
    data = session_id.encode("utf-8", "surrogatepass")
    if len(data) <= CONVERSATION_BYTES_MAX and session_id.isprintable():
        return session_id
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hinted(hints: Any) -> dict[str, Any]:
    """What ``kv_hints`` say to Octavo. Actions of other types are for others."""
    values: dict[str, Any] = {}
    actions: Iterable[Any] = () if hints is None else hints.actions
    for action in actions:
        if action.action_type != PARAMS_KEY:
            continue
        if action.action_version != HINTS_VERSION:
            raise BadParams(
                f"kv_hints: version {action.action_version!r} of action {PARAMS_KEY!r}; "
                f"known is {HINTS_VERSION}"
            )
        values |= _object(action.payload, "kv_hints: payload")
    return values


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadParams(f"{name} is {type(value).__name__}, must be an object")
    return dict(cast("Mapping[str, Any]", value))


def _check(values: dict[str, Any], kinds: Mapping[str, tuple[type, ...]], prefix: str) -> None:
    for name, value in values.items():
        if name not in kinds:
            raise BadParams(f"unknown {prefix + name!r}; known are {', '.join(kinds)}")
        if type(value) not in kinds[name]:
            allowed = " or ".join(kind.__name__ for kind in kinds[name])
            raise BadParams(f"{prefix}{name} is {value!r}, must be {allowed}")
