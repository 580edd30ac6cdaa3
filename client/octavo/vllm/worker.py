"""A worker's half: carries out the scheduler's orders on this worker's KV cache."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from octavo.chain import Chain
from octavo.client import Client
from octavo.errors import ClientClosed, OctavoError
from octavo.vllm.blocks import Blocks
from octavo.vllm.draining import forget, register
from octavo.vllm.loading import Loader, LoadJob
from octavo.vllm.orders import ChainPart, StepOrders, WorkerReport
from octavo.vllm.plan import turn_of
from octavo.vllm.saving import PUT_TIMEOUT_S, Saver, SaveTarget, behind_s
from octavo.vllm.settings import ConnectorSettings, Role
from octavo_proto.layout import Layout

CLOSE_DRAIN_S: Final = 5.0
"""At an orderly end, what was copied out is put within this."""

IDLE_WAIT_S: Final = 0.001
"""A step that computes nothing waits this long for a load. Else the engine's loop would spin,
and keep the interpreter from the very threads that it waits for: 5 ms each time they need it."""

logger = logging.getLogger("octavo.vllm")


@dataclass(slots=True)
class _Epoch:
    """What belongs to one weights epoch."""

    client: Client
    blocks: Blocks
    chains: dict[str, Chain] = field(default_factory=dict[str, Chain])


class WorkerSide:
    """One for each worker. vLLM's worker thread calls every method."""

    def __init__(
        self,
        settings: ConnectorSettings,
        role: Role,
        layout: Layout,
        replica: tuple[int, int],
        make_client: Callable[[Layout], Client],
        make_blocks: Callable[[Layout], Blocks],
        count: Callable[[str, int], None],
    ) -> None:
        """``replica``: which of how many workers with the same KV this one is."""
        self._settings: Final = settings
        self._wait_pending: Final = role is Role.CONSUMER
        self._replica: Final = replica
        self._make_client = make_client
        self._make_blocks = make_blocks
        self._layout: Layout = layout
        self._now = _Epoch(make_client(layout), make_blocks(layout))
        self._saver: Final = Saver(settings.staging_bytes, count, behind_s(role))
        self._loader: Final = Loader()
        self._failed_block_ids: set[int] = set()
        self._report = WorkerReport()
        register(self._saver)
        threading.Thread(target=self._warm_up, name="octavo-warm-up", daemon=True).start()

    @property
    def client(self) -> Client:
        return self._now.client

    def before_forward(self, orders: StepOrders) -> None:
        """Before the step writes to any block."""
        self._enter_epoch(orders.epoch)
        self._saver.drop(orders.lost_blocks_of)
        self._saver.drop(orders.ended)
        for request_id in orders.ended:
            self._now.chains.pop(request_id, None)

    def start_loads(self, orders: StepOrders) -> None:
        """Begins the step's loads; in ``sync`` mode, ends them too."""
        for part in orders.chains:
            self._extend_chain(part)
        now_s = time.monotonic()
        start = self._loader.run if self._settings.load == "sync" else self._loader.submit
        for order in orders.loads:
            chain = self._now.chains[order.request_id]
            start(
                LoadJob(
                    self._now.client,
                    self._now.blocks,
                    chain,
                    order,
                    now_s + order.timeout_s,
                    self._wait_pending,
                )
            )

    def save(self, orders: StepOrders) -> None:
        """Copies out what the step has computed."""
        target = SaveTarget(self._now.client, self._now.blocks)
        self._saver.retry()
        for order in orders.saves:
            chain = self._now.chains[order.request_id]
            first_page, page_end = turn_of(*self._replica, order.first_page, order.page_end)
            if first_page < page_end:
                mine = order.beyond(first_page, target.blocks.pages_per_block)
                self._saver.take(target, chain, replace(mine, page_end=page_end))

    def finished_loads(self, orders: StepOrders) -> set[str]:
        """Requests whose load ended since the last call, well or not."""
        finished: set[str] = set()
        for loaded in self._loader.ended(0.0 if orders.computes else IDLE_WAIT_S):
            finished.add(loaded.report.request_id)
            self._failed_block_ids.update(loaded.failed_block_ids)
            self._report.loads.append(loaded.report)
        return finished

    def failed_block_ids(self) -> set[int]:
        """Blocks that hold no KV although they should, since the last call."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def report(self) -> WorkerReport | None:
        """What there is to tell the scheduler's half."""
        self._report.saves += self._saver.reports()
        if not self._report.loads and not self._report.saves:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """Puts what was copied out, for a bounded time, and ends threads and sessions."""
        self._saver.drain(CLOSE_DRAIN_S)
        self._saver.close()
        forget(self._saver)
        self._loader.close()
        self._now.client.close()

    def _warm_up(self) -> None:
        """Has the session ready before the first load and save need it."""
        try:
            self._now.client.connect()
        except ClientClosed:
            return  # the engine ended before it had begun
        except OctavoError as error:
            logger.warning("octavo: no session yet, nothing is loaded or saved: %s", error)

    def _retire(self, client: Client) -> None:
        """Ends the session of a past epoch when nothing uses it any more."""
        self._saver.drain(PUT_TIMEOUT_S)
        time.sleep(self._settings.load_timeout_s)
        client.close()

    def _extend_chain(self, part: ChainPart) -> None:
        if part.first_token == 0:
            chain = self._now.client.chain(namespace=part.namespace)
            self._now.chains[part.request_id] = chain
        else:
            chain = self._now.chains[part.request_id]
        assert chain.token_count == part.first_token, part.request_id
        chain.extend(array("I", part.tokens), part.extras)

    def _enter_epoch(self, epoch: int) -> None:
        """After a reset: another layout, thus another session and chains."""
        if epoch == self._layout.weights_epoch:
            return
        self._layout = replace(self._layout, weights_epoch=epoch)
        threading.Thread(target=self._retire, args=(self._now.client,), daemon=True).start()
        self._now = _Epoch(self._make_client(self._layout), self._make_blocks(self._layout))
