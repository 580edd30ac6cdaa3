"""What ``kv_connector_extra_config`` may say: one frozen value, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Self, cast

from octavo.codec import Profile
from octavo.errors import InvalidRequest
from octavo.vllm.errors import EngineRefused


class Role(Enum):
    """vLLM's ``kv_role``: who stores, who loads."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"

    @property
    def loads(self) -> bool:
        return self is not Role.PRODUCER

    @property
    def saves(self) -> bool:
        return self is not Role.CONSUMER


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Field names are the keys of ``kv_connector_extra_config``; all have defaults."""

    address: str | None = None
    """The node: ``unix:/path`` or ``host:port``. None: ``$OCTAVO_ADDRESS``, else the default."""
    namespace: str = "default"
    namespaces: tuple[str, ...] = ()
    """Further namespaces that a request may choose."""
    model: str | None = None
    """Identity of the model; None: the checkpoint's folder name or hub id."""
    weights_revision: str | None = None
    """Identity of the weights; None: a digest of the checkpoint's files, or the hub's commit."""
    weights_epoch: int = 0
    """To be raised when weights change under the same revision. A reset of the connector's
    cache raises it, to a value that no other engine has."""
    profile: str = "exact"
    """How pages of canonical layouts are packed."""
    page_tokens: int = 16
    """Of canonical layouts. An opaque page is always one of the engine's blocks."""
    tp_sizes: tuple[int, ...] = ()
    """Sizes of tensor parallelism whose engines share pages; the engine's own is always in it."""
    load: str = "async"
    """``async``: other requests go on while pages are copied. ``sync``: the step waits."""
    load_policy: str = "measured"
    """``measured``: load what is estimated to come sooner than it would be recomputed."""
    match_timeout_s: float = 0.25
    """A match that takes longer is a miss."""
    load_timeout_s: float = 10.0
    """Pages that have not come within it are recomputed; sooner, once it was measured how long
    loading and computing take."""
    pending_timeout_s: float = 5.0
    """How long a ``kv_consumer`` waits for pages that a producer is writing."""
    staging_bytes: int = 256 << 20
    """Host memory of each worker for pages on their way to the node."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """The settings that ``extra`` states.

        Raises:
            EngineRefused: an unknown key, or a value of the wrong type or range; names it.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise EngineRefused(
                f"kv_connector_extra_config: unknown {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known))}"
            )
        settings = cls(**{name: _typed(name, extra[name]) for name in extra})
        settings._check()
        return settings

    @property
    def all_namespaces(self) -> tuple[str, ...]:
        """The engine's own first, each once."""
        return tuple(dict.fromkeys((self.namespace, *self.namespaces)))

    def _check(self) -> None:
        _require("load", self.load, self.load in ("async", "sync"), "async, sync")
        policies = ("measured", "always")
        _require("load_policy", self.load_policy, self.load_policy in policies, "measured, always")
        for name in ("match_timeout_s", "load_timeout_s"):
            value = cast("float", getattr(self, name))
            _require(name, value, 0 < value <= TIMEOUT_S_MAX, f"above 0, up to {TIMEOUT_S_MAX:g}")
        pending = self.pending_timeout_s
        _require("pending_timeout_s", pending, 0 <= pending <= TIMEOUT_S_MAX, "0 to 600")
        room = self.staging_bytes
        _require("staging_bytes", room, room >= STAGING_BYTES_MIN, f"at least {STAGING_BYTES_MIN}")
        _require("weights_epoch", self.weights_epoch, self.weights_epoch >= 0, "0 or more")
        _require("tp_sizes", self.tp_sizes, all(tp > 0 for tp in self.tp_sizes), "sizes above 0")
        try:
            Profile.named(self.profile)
        except InvalidRequest as error:
            raise EngineRefused(f"kv_connector_extra_config: profile: {error}") from None


TIMEOUT_S_MAX = 600.0
STAGING_BYTES_MIN = 1 << 20

_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("weights_epoch", "page_tokens", "staging_bytes"), (int,)),
    **dict.fromkeys(("match_timeout_s", "load_timeout_s", "pending_timeout_s"), (int, float)),
    **dict.fromkeys(("namespaces", "tp_sizes"), (list, tuple)),
}


def _typed(name: str, value: Any) -> Any:
    """``value`` if it has the field's type; JSON's lists become tuples."""
    wanted = _TYPES.get(name, (str,))
    _require(
        name,
        value,
        isinstance(value, wanted) and not isinstance(value, bool),
        " or ".join(kind.__name__ for kind in wanted),
    )
    if wanted != (list, tuple):
        return value
    items = tuple(cast("list[Any]", value))
    kind = int if name == "tp_sizes" else str
    _require(name, value, all(type(item) is kind for item in items), f"a list of {kind.__name__}")
    return items


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise EngineRefused(f"kv_connector_extra_config: {name} is {value!r}, allowed: {allowed}")
