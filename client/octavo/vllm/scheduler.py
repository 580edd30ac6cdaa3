"""The scheduler's half: asks what the node has, and orders what workers load and save.

vLLM's scheduler thread calls every method. None of them waits for the node: matches run on
other threads, and a request whose match is not there yet is asked for again in the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from octavo.client import Client
from octavo.status import Tier
from octavo.vllm.asking import Asking
from octavo.vllm.matching import Lookup, token_array
from octavo.vllm.orders import ChainPart, PageOrder, StepOrders, WorkerReport
from octavo.vllm.params import NO_WISH
from octavo.vllm.plan import covering_blocks, loadable_tokens, pages_by_tier, saveable_pages
from octavo.vllm.requests import NewRequest, RequestState, ScheduledRequest
from octavo.vllm.settings import ConnectorSettings, Role
from octavo.vllm.speed import LoadSpeed, PrefillSpeed, is_worth_loading, load_timeout_s
from octavo.wishes import SessionHint
from octavo_proto.layout import Layout


class SchedulerSide:
    """One for each engine."""

    def __init__(
        self,
        settings: ConnectorSettings,
        role: Role,
        layout: Layout,
        block_tokens: int,
        workers: int,
        make_client: Callable[[Layout], Client],
        count: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``workers`` report on each load. ``count`` is told what happened, by name and how
        often."""
        self._settings: Final = settings
        self._workers: Final = workers
        self._role: Final = role
        self._block_tokens: Final = block_tokens
        self._make_client = make_client
        self._count = count
        self._clock = clock
        self.prefill_speed: Final = PrefillSpeed()
        self.load_speed: Final = LoadSpeed()
        self._requests: dict[str, RequestState] = {}
        self._loads: list[PageOrder] = []
        self._ended: list[str] = []
        self._order_count = 0
        self._layout = layout
        self._client = make_client(layout)
        self._asking = self._new_asking()

    @property
    def layout(self) -> Layout:
        """The current one: it changes with the weights epoch."""
        return self._layout

    def present_pages(self, request_id: str) -> int | None:
        """Pages that the request's match has found; None where there was no answer."""
        state = self._requests.get(request_id)
        lookup = None if state is None else state.lookup
        if lookup is None or lookup.is_abandoned or not lookup.is_done:
            return None
        return lookup.match.page_count

    def new_request(self, new: NewRequest) -> None:
        """A request arrived: its match begins."""
        namespace = new.params.namespace or self._settings.namespace
        state = RequestState(
            request_id=new.request_id,
            chain=self._client.chain(namespace=namespace),
            namespace=namespace,
            identity=new.identity,
            may_load=new.may_load and new.params.load and self._role.loads,
            may_save=new.may_save and new.params.store and self._role.saves,
            params=new.params,
            untold=None
            if new.params.conversation is None
            else SessionHint(new.params.conversation),
            unsaid=new.params.retention if new.params.store else NO_WISH,
        )
        self._requests[new.request_id] = state
        if state.may_load or state.may_save:
            self._asking.begin(state, new.prompt)

    def matched_tokens(
        self, request_id: str, all_tokens: Sequence[int], local_tokens: int
    ) -> int | None:
        """Tokens to load beyond the engine's own ``local_tokens``; None: ask again."""
        state = self._requests.get(request_id)
        if state is None or not (state.may_load or state.may_save):
            return 0
        if state.lookup is None and not state.may_load:
            return 0  # its load failed, or it was preempted: what is stored needs no second look
        lookup = self._asking.current(state, all_tokens)
        if not self._asking.is_settled(lookup):
            return None
        if not state.may_load:
            return 0
        state.local_tokens = local_tokens
        token_count = len(all_tokens)
        page_tokens = self._layout.page_tokens
        found = lookup.match
        tokens = loadable_tokens(
            found.page_count, page_tokens, self._block_tokens, token_count, local_tokens
        )
        if self._asking.waits_for_producer(state, lookup, token_count, local_tokens + tokens):
            return None
        if tokens and not self._is_worth_it(lookup, tokens):
            self._count("loads_not_worth", 1)
            return 0
        return tokens

    def allocated(
        self,
        request_id: str,
        all_tokens: Sequence[int],
        block_ids: Sequence[int],
        external_tokens: int,
    ) -> None:
        """The request got blocks; ``external_tokens`` of them wait to be loaded."""
        state = self._requests.get(request_id)
        if state is None:
            return
        state.block_ids = list(block_ids)
        self._asking.retain_found(state)
        if external_tokens == 0:
            if state.load_window is None:
                self._note_present(state)
                self._asking.end(state)
            return
        page_tokens = self._layout.page_tokens
        first_page = state.local_tokens // page_tokens
        page_end = (state.local_tokens + external_tokens) // page_tokens
        self._note_present(state)
        _learn_tokens(state, all_tokens, page_end * page_tokens)
        state.load_window = (first_page, page_end)
        state.loads_left = self._workers
        order = self._page_order(state, first_page, page_end)
        self._loads.append(replace(order, timeout_s=self._load_timeout_s(state, external_tokens)))

    def hit_tiers(self, request_id: str) -> dict[Tier, int]:
        """Where the pages lie that are being loaded for a request, in pages."""
        state = self._requests.get(request_id)
        if state is None or state.load_window is None or state.lookup is None:
            return {}
        return pages_by_tier(state.lookup.match.runs, *state.load_window)

    def step_orders(
        self,
        scheduled: Iterable[ScheduledRequest],
        all_tokens_of: Callable[[str], Sequence[int] | None],
        step_tokens: int,
        preempted: Iterable[str],
    ) -> StepOrders:
        """The orders of a step, and what it has to know of the requests in it."""
        self._asking.step_scheduled(step_tokens)
        orders = StepOrders(
            epoch=self._layout.weights_epoch,
            computes=step_tokens > 0,
            lost_blocks_of=list(preempted),
        )
        orders.ended, self._ended = self._ended, []
        loads, self._loads = self._loads, []
        for load in loads:
            self._send_tokens(self._requests[load.request_id], load.page_end, orders)
            orders.loads.append(load)
        for each in scheduled:
            state = self._requests.get(each.request_id)
            if state is None:
                continue
            if each.replaces_blocks:
                state.block_ids = list(each.new_block_ids)
            else:
                state.block_ids += each.new_block_ids
            if state.may_save:
                self._order_saves(state, each.computed_tokens, all_tokens_of, orders)
        if step_tokens:
            self.prefill_speed.step_started(step_tokens, self._clock())
        return orders

    def worker_report(self, report: WorkerReport) -> None:
        """What workers answered in a step."""
        for load in report.loads:
            self._count("loaded_pages", load.loaded_end - load.first_page)
            self._count("loaded_bytes", load.size_bytes)
            self._count("load_failed_pages", load.page_end - load.loaded_end)
            self.load_speed.loaded(load.size_bytes, load.seconds)
            state = self._requests.get(load.request_id)
            if state is None:
                continue
            if load.loaded_end < load.page_end:
                # The node lost them, whatever it said: they are computed, and stored again.
                state.may_load = False
                state.saved_pages = min(state.saved_pages, load.loaded_end)
            state.loads_left -= 1
            if state.loads_left == 0:
                state.load_window = None
                self._asking.end(state)

    def step_ended(self) -> None:
        """A step's output arrived."""
        self.prefill_speed.step_ended(self._clock())

    def request_ended(self, request_id: str) -> RequestState | None:
        """Forgets a request; what was known of it."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._asking.end(state)
            if self._role is not Role.PRODUCER:  # else the consumer serves it to its end
                self._asking.tell_afterwards(state)
            self._ended.append(request_id)
        return state

    def next_epoch(self) -> None:
        """From now on, nothing that was stored before is found.

        The new epoch is the time in milliseconds: an engine that was restarted counts from its
        setting again, and must not come upon pages that were stored under other weights.

        Requests that are here already neither load nor store any more: part of their KV may be
        of older weights.
        """
        for state in self._requests.values():
            self._asking.end(state)
            state.may_load = state.may_save = False
        # Taking leave of a node that hangs takes half a second: not on this thread.
        threading.Thread(target=self._asking.close, daemon=True).start()
        epoch = max(self._layout.weights_epoch + 1, time.time_ns() // 1_000_000)
        self._layout = replace(self._layout, weights_epoch=epoch)
        self._client = self._make_client(self._layout)
        self._asking = self._new_asking()

    def close(self) -> None:
        """Ends threads and session."""
        self._asking.close()

    def _new_asking(self) -> Asking:
        return Asking(
            self._settings,
            self._role,
            self._layout,
            self._block_tokens,
            self._client,
            self._count,
            self._clock,
        )

    def _is_worth_it(self, lookup: Lookup, tokens: int) -> bool:
        if self._settings.load_policy == "always":
            return True
        return is_worth_loading(
            tokens,
            self._bytes_a_worker(tokens),
            lookup.match.load_s,
            self.prefill_speed.tokens_per_s,
            self.load_speed.bytes_per_s,
        )

    def _load_timeout_s(self, state: RequestState, tokens: int) -> float:
        ready_s = 0.0 if state.lookup is None else state.lookup.match.load_s
        limit_s = load_timeout_s(
            tokens,
            self._bytes_a_worker(tokens),
            ready_s,
            self.prefill_speed.tokens_per_s,
            self.load_speed.bytes_per_s,
        )
        return min(limit_s, self._settings.load_timeout_s)

    def _bytes_a_worker(self, tokens: int) -> int:
        """What each worker copies for so many tokens."""
        return tokens // self._layout.page_tokens * self._layout.raw_page_bytes // self._workers

    def _note_present(self, state: RequestState) -> None:
        """What the match found need not be saved."""
        lookup = state.lookup
        if lookup is not None and lookup.is_done:
            state.saved_pages = max(state.saved_pages, lookup.match.page_count)
            if not state.tokens and len(lookup.token_array) == state.chain_tokens:
                state.tokens = lookup.token_array

    def _order_saves(
        self,
        state: RequestState,
        computed_tokens: int,
        all_tokens_of: Callable[[str], Sequence[int] | None],
        orders: StepOrders,
    ) -> None:
        if computed_tokens // self._layout.page_tokens <= state.saved_pages:
            return  # most steps of a decode
        all_tokens = all_tokens_of(state.request_id)
        if all_tokens is None:
            return
        page_end = saveable_pages(computed_tokens, len(all_tokens), self._layout.page_tokens)
        if page_end <= state.saved_pages:
            return
        _learn_tokens(state, all_tokens, page_end * self._layout.page_tokens)
        self._send_tokens(state, page_end, orders)
        orders.saves.append(self._page_order(state, state.saved_pages, page_end))
        state.saved_pages = page_end

    def _page_order(self, state: RequestState, first_page: int, page_end: int) -> PageOrder:
        self._order_count += 1
        begin, end = covering_blocks(
            first_page, page_end, self._block_tokens // self._layout.page_tokens
        )
        return PageOrder(
            state.request_id,
            first_page,
            page_end,
            tuple(state.block_ids[begin:end]),
            self._order_count,
            retention=state.params.retention,
        )

    def _send_tokens(self, state: RequestState, page_end: int, orders: StepOrders) -> None:
        """Adds those tokens of the first ``page_end`` pages that the workers do not have."""
        begin, end = state.sent_tokens, page_end * self._layout.page_tokens
        if begin >= end:
            return
        first = begin == 0
        orders.chains.append(
            ChainPart(
                state.request_id,
                begin,
                state.tokens[begin:end].tobytes(),
                state.namespace if first else "",
                state.identity.extras(self._layout.page_tokens) if first else {},
            )
        )
        state.sent_tokens = end


def _learn_tokens(state: RequestState, all_tokens: Sequence[int], token_count: int) -> None:
    """Makes sure that the first ``token_count`` tokens are known here."""
    if len(state.tokens) < token_count:
        state.tokens += token_array(all_tokens[len(state.tokens) : token_count])
