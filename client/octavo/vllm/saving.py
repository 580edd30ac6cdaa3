"""Saves: pages are copied out at once, and put by a thread.

The copy costs the engine's thread what the memory costs (docs/decisions/0005-vllm-connector.md
has the figures), and in return blocks are never held back for a save: they can be freed,
preempted and reused in the next step. What finds no room waits for as long as its request keeps
its blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.chain import Chain
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.results import PutResult
from octavo.status import Status
from octavo.vllm.blocks import Blocks, Snapshot
from octavo.vllm.orders import PageOrder, SaveReport
from octavo.vllm.settings import Role

PUT_TIMEOUT_S: Final = 10.0
PIECES: Final = 4
"""A snapshot takes at most this part of the room, so that one is put while the next is made."""

BEHIND_S: Final = 0.02
"""A put begins this long after its pages were copied out: the step's first token goes out in that
time, and would have to share the interpreter and the processors with it."""

logger = logging.getLogger("octavo.vllm")


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where a save goes. It changes with the weights epoch."""

    client: Client
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class _Put:
    target: SaveTarget
    chain: Chain
    order: PageOrder
    page_end: int
    snapshot: Snapshot
    due_s: float
    """When it may begin, on the monotonic clock."""

    @property
    def first_page(self) -> int:
        return self.order.first_page


class Saver:
    """``take`` and ``retry`` run on the engine's thread, puts on one of its own."""

    def __init__(self, room_bytes: int, count: Callable[[str, int], None], behind_s: float) -> None:
        """``behind_s``: how long puts stay behind the step whose pages they put."""
        self._room_bytes: Final = room_bytes
        self._behind_s: Final = behind_s
        self._count = count
        self._waiting: deque[tuple[SaveTarget, Chain, PageOrder]] = deque()
        self._puts: deque[_Put] = deque()
        self._condition = threading.Condition()
        self._busy = False
        self._closed = False
        self._reports: list[SaveReport] = []
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="octavo-save", daemon=True)
        self._thread.start()

    def take(self, target: SaveTarget, chain: Chain, order: PageOrder) -> None:
        """Copies the order's pages out; those that find no room wait."""
        left = order if self._waiting else self._copy_out(target, chain, order)
        if left is not None:
            self._waiting.append((target, chain, left))
            with self._condition:
                self._condition.notify_all()

    def retry(self) -> None:
        """Tries those that wait again."""
        while self._waiting:
            target, chain, order = self._waiting.popleft()
            left = self._copy_out(target, chain, order)
            if left is not None:
                self._waiting.appendleft((target, chain, left))
                return

    def drop(self, request_ids: Iterable[str]) -> None:
        """Gives up what waits for these requests: their blocks are about to be reused."""
        if not self._waiting:
            return
        gone = set(request_ids)
        kept = [job for job in self._waiting if job[2].request_id not in gone]
        for _target, _chain, order in self._waiting:
            if order.request_id in gone:
                self._count("save_dropped_pages", order.page_end - order.first_page)
        self._waiting = deque(kept)

    def reports(self) -> list[SaveReport]:
        """What became visible since the last call."""
        with self._condition:
            reports, self._reports = self._reports, []
        return reports

    def drain(self, timeout_s: float) -> bool:
        """Waits until every copy is put; whether they are within ``timeout_s``."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._puts and not self._busy, timeout_s)

    def close(self) -> None:
        """Ends the thread after the put that is in progress."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _copy_out(self, target: SaveTarget, chain: Chain, order: PageOrder) -> PageOrder | None:
        """Copies what finds room. What is left of the order, or None."""
        blocks = target.blocks
        pages_max = max(1, self._room_bytes // PIECES // blocks.page_bytes)
        left = order
        while left.first_page < left.page_end:
            page_end = min(left.page_end, left.first_page + pages_max)
            snapshot = blocks.snapshot(left.block_ids, left.first_page, page_end)
            if snapshot is None:
                return left
            due_s = time.monotonic() + self._behind_s
            put = _Put(target, chain, left, page_end, snapshot, due_s)
            with self._condition:
                self._puts.append(put)
                self._condition.notify_all()
            left = left.beyond(page_end, blocks.pages_per_block)
        return None

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._puts or self._closed)
                if self._closed:
                    return
                put = self._puts.popleft()
                self._busy = True
            self._stay_behind(put)
            try:
                self._put(put)
            finally:
                put.snapshot.release()

    def _stay_behind(self, put: _Put) -> None:
        """Waits until the put is due, or its room is wanted for pages that wait."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._waiting or self._closed, max(0.0, put.due_s - time.monotonic())
            )

    def _put(self, put: _Put) -> None:
        page_count, units = put.page_end - put.first_page, put.target.blocks.units
        try:
            with put.target.blocks.transfers():
                result = put.target.client.put(
                    put.chain,
                    put.snapshot.source,
                    first_page=put.first_page,
                    page_count=page_count,
                    units=units,
                    ttl_s=put.order.retention.ttl_s,
                    pin_s=put.order.retention.pin_s,
                    timeout_s=PUT_TIMEOUT_S,
                )
        except OctavoError as error:
            self._count("save_failed_pages", page_count)
            self._complain(str(error))
            return
        except Exception:  # whatever it was (a GPU's memory, say): the next save is not to suffer
            self._count("save_failed_pages", page_count)
            logger.exception("octavo: a save failed")
            return
        self._count("saved_pages", result.stored_pages)
        self._count("save_present_pages", result.present_pages)
        self._count("save_failed_pages", result.failed_pages)
        self._count("saved_bytes", result.bytes_put)
        self._count("unpinned_pages", result.unpinned_pages)
        if result.failed_pages:
            self._complain(_reasons(result))
        page_end = put.first_page + _leading_good(result.statuses, len(units))
        if page_end > put.first_page:
            with self._condition:
                self._reports.append(SaveReport(put.order.order_id, put.first_page, page_end))

    def _complain(self, reason: str) -> None:
        """Said once for each reason, until there is another."""
        if reason != self._complaint:
            self._complaint = reason
            logger.error("octavo: saves fail: %s", reason)


def behind_s(role: Role) -> float:
    """How long an engine's puts stay behind. What a producer stores, a consumer waits for."""
    return 0.0 if role is Role.PRODUCER else BEHIND_S


def _reasons(result: PutResult) -> str:
    """Statuses of what the node did not take, as ``TOO_LARGE``."""
    bad = set(result.counts) - {Status.STORED, Status.ALREADY_PRESENT}
    return ", ".join(sorted(status.name for status in bad))


def _leading_good(statuses: NDArray[np.uint8], units_per_page: int) -> int:
    """Pages at the start of which everything is on the node."""
    good = (statuses == Status.STORED) | (statuses == Status.ALREADY_PRESENT)
    bad_pages = np.flatnonzero(~good.reshape(-1, units_per_page).all(axis=1))
    return int(bad_pages[0]) if len(bad_pages) else len(statuses) // units_per_page
