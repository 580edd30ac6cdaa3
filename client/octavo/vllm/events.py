"""Which of the engine's blocks lie on the node, as far as this engine knows: for KV events.

A block is announced when its save is visible, or when a match finds it; it is withdrawn when a
match no longer does. What other engines store is not announced before this one has matched it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from octavo.vllm.orders import PageOrder, SaveReport

ANNOUNCED_MAX: Final = 262_144
"""Blocks that are remembered; beyond that the oldest are withdrawn. 8M tokens of 32 a block."""

ORDERS_MAX: Final = 4096
"""Save orders that were not reported whole; older ones are forgotten, their blocks unannounced."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive blocks of one request that are on the node now."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    lora_name: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that are no longer there."""

    hashes: tuple[bytes, ...]


Event = StoredBlocks | RemovedBlocks


@dataclass(slots=True)
class _Order:
    """Blocks of a save order, and how many reports still miss for each of its pages."""

    first_page: int
    reports_left: list[int]
    first_block: int
    blocks: StoredBlocks
    announced: set[int] = field(default_factory=set[int])


class EventLog:
    """Used by the scheduler's thread alone. ``take`` hands over what happened."""

    def __init__(self, block_tokens: int, page_tokens: int, reports_per_page: int) -> None:
        """``reports_per_page``: workers that each put a part of every page."""
        self._block_tokens: Final = block_tokens
        self._pages_per_block: Final = block_tokens // page_tokens
        self._reports_per_page: Final = reports_per_page
        self._orders: OrderedDict[int, _Order] = OrderedDict()
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[Event] = []

    def ordered(
        self,
        order: PageOrder,
        hashes: Sequence[bytes],
        all_tokens: Sequence[int],
        lora_name: str | None = None,
        session_id: str | None = None,
    ) -> None:
        """Pages were ordered to be saved. ``hashes`` are those of all blocks of the request."""
        first_block = -(-order.first_page // self._pages_per_block)
        block_end = min(order.page_end // self._pages_per_block, len(hashes))
        if block_end <= first_block:
            return
        blocks = self._blocks(hashes, all_tokens, first_block, block_end, lora_name, session_id)
        page_count = order.page_end - order.first_page
        self._orders[order.order_id] = _Order(
            order.first_page, [self._reports_per_page] * page_count, first_block, blocks
        )
        while len(self._orders) > ORDERS_MAX:
            self._orders.popitem(last=False)

    def saved(self, report: SaveReport) -> None:
        """A worker's part of some pages is visible."""
        order = self._orders.get(report.order_id)
        if order is None:
            return
        for page in range(report.first_page, report.page_end):
            order.reports_left[page - order.first_page] -= 1
        self._announce_complete(order)
        if not any(order.reports_left):
            del self._orders[report.order_id]

    def matched(
        self,
        present_pages: int,
        hashes: Sequence[bytes],
        all_tokens: Sequence[int],
        lora_name: str | None = None,
        session_id: str | None = None,
    ) -> None:
        """A match found the first ``present_pages`` of a request, and no more."""
        present = min(present_pages // self._pages_per_block, len(hashes))
        begin = next(
            (place for place in range(present) if hashes[place] not in self._announced), present
        )
        if begin < present:
            self._announce(self._blocks(hashes, all_tokens, begin, present, lora_name, session_id))
        for each in hashes[:begin]:
            self._announced.move_to_end(each)
        gone = tuple(each for each in hashes[present:] if each in self._announced)
        self._withdraw(gone)

    def forget_all(self) -> None:
        """Nothing that was announced can be found any more."""
        self._orders.clear()
        self._withdraw(tuple(self._announced))

    def take(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def _announce_complete(self, order: _Order) -> None:
        """Announces blocks all of whose pages are there, in runs."""
        blocks, begin = order.blocks, None
        for place in range(len(blocks.hashes) + 1):
            is_new = place < len(blocks.hashes) and place not in order.announced
            if is_new and self._is_complete(order, place):
                begin = place if begin is None else begin
                order.announced.add(place)
            elif begin is not None:
                self._announce(self._part(blocks, begin, place))
                begin = None

    def _is_complete(self, order: _Order, place: int) -> bool:
        first = (order.first_block + place) * self._pages_per_block - order.first_page
        return not any(order.reports_left[first : first + self._pages_per_block])

    def _part(self, blocks: StoredBlocks, begin: int, end: int) -> StoredBlocks:
        tokens = blocks.token_ids[begin * self._block_tokens : end * self._block_tokens]
        parent = blocks.hashes[begin - 1] if begin else blocks.parent
        return StoredBlocks(
            blocks.hashes[begin:end], parent, tokens, blocks.lora_name, blocks.session_id
        )

    def _blocks(
        self,
        hashes: Sequence[bytes],
        all_tokens: Sequence[int],
        begin: int,
        end: int,
        lora_name: str | None,
        session_id: str | None,
    ) -> StoredBlocks:
        tokens = tuple(all_tokens[begin * self._block_tokens : end * self._block_tokens])
        parent = hashes[begin - 1] if begin else None
        return StoredBlocks(tuple(hashes[begin:end]), parent, tokens, lora_name, session_id)

    def _announce(self, blocks: StoredBlocks) -> None:
        self._events.append(blocks)
        for each in blocks.hashes:
            self._announced[each] = None
            self._announced.move_to_end(each)
        excess = len(self._announced) - ANNOUNCED_MAX
        if excess > 0:
            self._withdraw(tuple(list(self._announced)[:excess]))

    def _withdraw(self, hashes: tuple[bytes, ...]) -> None:
        if hashes:
            self._events.append(RemovedBlocks(hashes))
            for each in hashes:
                self._announced.pop(each, None)
