"""Whether the node has been asked about a request, has answered, and should be asked again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from octavo.client import Client
from octavo.vllm.matching import Lookup, Matcher
from octavo.vllm.params import NO_WISH
from octavo.vllm.plan import loadable_tokens
from octavo.vllm.requests import RequestState
from octavo.vllm.settings import ConnectorSettings, Role
from octavo_proto.layout import Layout

ASK_WAIT_S: Final = 0.0003
"""A match mostly takes less than a millisecond: waiting for it this long, once a step, costs
less than another step of the engine."""

IDLE_WAIT_S: Final = 0.0006
"""A step that computes nothing waits this long for a match instead of spinning."""

GRACE_S: Final = 0.25
"""A match may still be answered this long after nobody waits for it any more: the scheduler gives
up first, and counts that, and the client learns that the node hangs all the same."""

RETRY_S: Final = 0.005
"""Between two matches of a consumer that waits for a producer's pages."""

HOLD_SHARE: Final = 0.8
"""Of a hold's time: after that, a request that still waits is matched again."""

UNHELD_S: Final = 10.0
"""A match without hold is asked again after this."""


class Asking:
    """The lookups of one weights epoch. Used by the scheduler's thread alone."""

    def __init__(
        self,
        settings: ConnectorSettings,
        role: Role,
        layout: Layout,
        block_tokens: int,
        client: Client,
        count: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings: Final = settings
        self._role: Final = role
        self._layout: Final = layout
        self._block_tokens: Final = block_tokens
        self._count = count
        self._clock = clock
        self._asked_in_step = False
        self._unsettled: Lookup | None = None
        self._matcher = Matcher(client, count)
        self._matcher.connect()

    def step_scheduled(self, step_tokens: int) -> None:
        """A step was scheduled. One that computes nothing has time to wait for a match."""
        if not step_tokens and self._unsettled is not None:
            self._unsettled.wait(IDLE_WAIT_S)
        self._unsettled = None
        self._asked_in_step = False

    def close(self) -> None:
        """Ends the threads and the client."""
        self._matcher.close()

    def current(self, state: RequestState, all_tokens: Sequence[int]) -> Lookup:
        """The request's current lookup; a new one if it has none that is fresh enough."""
        lookup = state.lookup
        if lookup is None or (lookup.is_done and self._is_stale(lookup)):
            return self.begin(state, all_tokens[state.chain_tokens :])
        return lookup

    def begin(self, state: RequestState, new_tokens: Sequence[int]) -> Lookup:
        self.end(state)
        extras = state.identity.extras(self._layout.page_tokens) if not state.chain_tokens else {}
        lookup = Lookup(
            state.chain,
            state.chain_tokens,
            new_tokens,
            extras,
            hold=state.may_load,
            hint=state.untold,
        )
        state.untold = None  # once is enough: a consumer asks many times
        state.lookup = lookup
        state.chain_tokens += len(new_tokens)
        self._count("matches", 1)
        self._matcher.submit(lookup, self._settings.match_timeout_s + GRACE_S)
        return lookup

    def end(self, state: RequestState) -> None:
        if state.lookup is not None:
            self._matcher.abandon(state.lookup)
            state.lookup = None

    def _is_stale(self, lookup: Lookup) -> bool:
        held = lookup.match.hold
        lasts_s = UNHELD_S if held is None else held.hold_s * HOLD_SHARE
        return self._clock() > lookup.done_at_s + lasts_s

    def retain_found(self, state: RequestState) -> None:
        """Lets what was found stay as long as the request wishes. Said once, when it is clear what
        the request goes on with: a consumer asks many times before."""
        lookup = state.lookup
        if state.unsaid and lookup is not None and lookup.match.page_count:
            self._matcher.retain(state.chain, state.unsaid, lookup.match.page_count)
            state.unsaid = NO_WISH

    def tell_afterwards(self, state: RequestState) -> None:
        """A request has been served: what it said of its session comes true now."""
        if state.params.afterwards is not None:
            known = (
                state.chain if state.chain_tokens and state.chain.layout == self._layout else None
            )
            self._matcher.tell(state.params.afterwards, known, state.namespace)

    def is_settled(self, lookup: Lookup) -> bool:
        """Whether the lookup is answered, or given up now because it took too long."""
        if lookup.is_done or lookup.is_abandoned:
            return True
        if not self._asked_in_step:
            self._asked_in_step = True
            if lookup.wait(ASK_WAIT_S):
                return True
        now_s = self._clock()
        if lookup.asked_at_s is None:
            lookup.asked_at_s = now_s
        if now_s < lookup.asked_at_s + self._settings.match_timeout_s:
            self._unsettled = lookup
            return False
        self._count("match_timeouts", 1)
        self._matcher.abandon(lookup)
        return True

    def waits_for_producer(
        self, state: RequestState, lookup: Lookup, token_count: int, have_tokens: int
    ) -> bool:
        """Whether a consumer should ask again for pages that are being written."""
        match = lookup.match
        if lookup.is_abandoned or (self._role is not Role.CONSUMER and not state.params.tokens):
            return False
        pages = max(
            match.page_count + match.pending_count, state.params.tokens // self._layout.page_tokens
        )
        coming = loadable_tokens(
            pages, self._layout.page_tokens, self._block_tokens, token_count, 0
        )
        if coming <= have_tokens:
            return False
        now_s = self._clock()
        if state.waits_since_s is None:
            state.waits_since_s = now_s
        if now_s >= state.waits_since_s + self._settings.pending_timeout_s:
            return False
        if now_s >= lookup.done_at_s + RETRY_S:
            self.begin(state, ())
        return True
