"""What the scheduler's half remembers of each request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.chain import Chain
from octavo.vllm.identity import RequestIdentity
from octavo.vllm.matching import Lookup
from octavo.vllm.params import NO_WISH, RequestParams, Retention
from octavo.wishes import SessionHint


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
    params: RequestParams = field(default_factory=RequestParams)
    untold: SessionHint | None = None
    """That its session goes on, until the first lookup has told it."""
    unsaid: Retention = NO_WISH
    """How long what is found should stay, until it was said."""
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
