"""What the scheduler's half remembers of each request."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from octavo.chain import Chain
from octavo.vllm.identity import RequestIdentity
from octavo.vllm.matching import Lookup

PARAMS_KEY = "octavo"


class BadParams(ValueError):  # noqa: N818 - says what is wrong
    """``kv_transfer_params["octavo"]`` says something that nobody understands."""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a request may say in ``kv_transfer_params={"octavo": {...}}``."""

    namespace: str | None = None
    """One of those that the engine's settings list."""
    load: bool = True
    store: bool = True
    tokens: int = 0
    """A producer has stored, or is about to store, so many tokens of the prompt."""

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, namespaces: tuple[str, ...]) -> Self:
        """Those of a request.

        Raises:
            BadParams: an unknown key, a wrong type or a namespace that is not listed.
        """
        stated = (params or {}).get(PARAMS_KEY)
        if stated is None:
            return cls()
        if not isinstance(stated, Mapping):
            raise BadParams(f"{PARAMS_KEY} is {type(stated).__name__}, must be an object")
        values = cast("Mapping[str, Any]", stated)
        kinds = {"namespace": str, "load": bool, "store": bool, "tokens": int}
        for name, value in values.items():
            if name not in kinds:
                raise BadParams(f"unknown {name!r}; known are {', '.join(kinds)}")
            if type(value) is not kinds[name]:
                raise BadParams(f"{name} is {value!r}, must be {kinds[name].__name__}")
        namespace = values.get("namespace")
        if namespace is not None and namespace not in namespaces:
            raise BadParams(f"namespace {namespace!r} is none of {', '.join(namespaces)}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What is needed of a request that arrived."""

    request_id: str
    prompt: Sequence[int]
    params: RequestParams
    identity: RequestIdentity
    may_load: bool
    may_save: bool


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request in a step: blocks that it got, and how far its KV will be computed."""

    request_id: str
    new_block_ids: Sequence[int]
    replaces_blocks: bool
    computed_tokens: int
    """When the step ends, speculated tokens included."""


@dataclass(slots=True)
class RequestState:
    """A request from its arrival to its end. Used by the scheduler's thread alone."""

    request_id: str
    chain: Chain
    namespace: str
    identity: RequestIdentity
    may_load: bool
    may_save: bool
    awaited_tokens: int = 0
    """Tokens that a producer has announced."""
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """Those known here; the chain gets the same."""
    lookup: Lookup | None = None
    chain_tokens: int = 0
    """Tokens that the chain has, or will have once the lookup is done."""
    waits_since_s: float | None = None
    """When the request first waited for pages that a producer is writing."""
    local_tokens: int = 0
    """The engine's own hit when it last asked."""
    load_window: tuple[int, int] | None = None
    """Pages that are being loaded."""
    loads_left: int = 0
    """Workers that have not reported on that load."""
    block_ids: list[int] = field(default_factory=list[int])
    sent_tokens: int = 0
    """Tokens that the workers know."""
    saved_pages: int = 0
    """Pages at the start that are on the node, or ordered to be."""
