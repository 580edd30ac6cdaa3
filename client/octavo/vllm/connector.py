"""The face that vLLM calls. Only dispatches: to ``scheduler.py`` in the engine's process, to
``worker.py`` in each worker's. Only it, ``statistics.py`` and ``publishing.py`` import vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from octavo.client import Client
from octavo.shards import ShardMap
from octavo.status import Tier
from octavo.vllm.blocks import Blocks, ordered_caches
from octavo.vllm.counting import Counters
from octavo.vllm.engine import describe
from octavo.vllm.events import EventLog
from octavo.vllm.layouts import layout_of
from octavo.vllm.orders import StepOrders, WorkerReport
from octavo.vllm.params import PARAMS_KEY
from octavo.vllm.platform import opaque_form, tensor_parallel_rank
from octavo.vllm.publishing import engine_events
from octavo.vllm.reading import all_tokens, event_parts, new_request, scheduled_requests
from octavo.vllm.scheduler import SchedulerSide
from octavo.vllm.settings import ConnectorSettings, Role
from octavo.vllm.statistics import OctavoPromMetrics, OctavoStats
from octavo.vllm.worker import WorkerSide
from octavo_proto.layout import Layout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("octavo.vllm")


class OctavoConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefixes come from and go to an Octavo node. See docs/engines/vllm.md.

    Raises:
        EngineRefused: the engine is set up in a way that cannot be served; says which.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = ConnectorSettings.parse(transfer.kv_connector_extra_config or {})
        self._kv_role = Role(transfer.kv_role)
        self._kv = describe(vllm_config, kv_cache_config, self._settings, opaque_form(vllm_config))
        self._layout = layout_of(self._kv, self._settings, self._settings.weights_epoch)
        self._block_count = int(kv_cache_config.num_blocks)
        self._counters = Counters()
        self._live: dict[str, Any] = {}
        self._events: EventLog | None = None
        self._scheduler_half: SchedulerSide | None = None
        self._worker_half: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_half = SchedulerSide(
                self._settings,
                self._kv_role,
                self._layout,
                self._kv.block_tokens,
                self._kv.tp,
                self._make_client,
                self._counters.add,
            )
            self._events = self._event_log(vllm_config)
            logger.info("octavo: layout %s", self._layout.name)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody depends on what is stored: a save that is lost is a miss later."""
        return False

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._live[request.request_id] = request
        self._scheduler().new_request(
            new_request(request, self._settings.all_namespaces, self._counters.add)
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id not in self._live:
            self.on_new_request(request)
        tokens = self._scheduler().matched_tokens(
            request.request_id, request.all_token_ids, num_computed_tokens
        )
        return tokens, bool(tokens) and self._settings.load == "async"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        present_pages = self._scheduler().present_pages(request.request_id)
        if self._events is not None and present_pages is not None:
            self._events.matched(present_pages, *event_parts(request))
        self._scheduler().allocated(
            request.request_id,
            request.all_token_ids,
            blocks.get_block_ids()[0],
            num_external_tokens,
        )

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        sources = {
            Tier.MEMORY: CacheHitSource.HOST,
            Tier.NVME: CacheHitSource.DISK,
            Tier.PEER: CacheHitSource.P2P,
        }
        found: dict[Any, int] = {}
        for tier, pages in self._scheduler().hit_tiers(request.request_id).items():
            source = sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + pages * self._layout.page_tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        orders = self._scheduler().step_orders(
            scheduled_requests(scheduler_output),
            lambda request_id: all_tokens(self._live.get(request_id)),
            scheduler_output.total_num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
        )
        if self._events is not None:
            for order in orders.saves:
                self._events.ordered(order, *event_parts(self._live[order.request_id]))
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        half = self._scheduler()
        half.step_ended()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            half.worker_report(report)
            if self._events is not None:
                for save in report.saves:
                    self._events.saved(save)

    def take_events(self) -> Iterable[Any]:
        return () if self._events is None else engine_events(self._events, self._kv.block_tokens)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._live.pop(request.request_id, None)
        state = self._scheduler().request_ended(request.request_id)
        if state is None or self._kv_role is not Role.PRODUCER or not state.saved_pages:
            return False, None
        tokens = state.saved_pages * self._layout.page_tokens
        return False, {PARAMS_KEY: {"tokens": tokens}}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        self._scheduler().next_epoch()
        if self._events is not None:
            self._events.forget_all()
        return True

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = tensor_parallel_rank()
        shard = ShardMap(self._layout, self._kv.tp).shard(rank)
        caches = ordered_caches(kv_caches, self._kv.layer_names)

        if self._kv.is_opaque:
            from octavo.vllm.opaque import OpaqueBlocks, StagingRoom

            room = StagingRoom(self._settings.staging_bytes)

            def make_blocks(layout: Layout) -> Blocks:
                return OpaqueBlocks(layout, shard, caches, room)
        else:
            from octavo.vllm.canonical import Budget, CanonicalBlocks

            budget = Budget(self._settings.staging_bytes)

            def make_blocks(layout: Layout) -> Blocks:
                return CanonicalBlocks(
                    layout, shard, caches, self._block_count, self._settings.profile, budget
                )

        self._worker_half = WorkerSide(
            self._settings,
            self._kv_role,
            self._layout,
            (shard.replica, shard.replicas),
            self._make_client,
            make_blocks,
            self._counters.add,
        )

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker_half is not None:
            self._worker_half.before_forward(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker_half is not None:
            self._worker_half.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are of whole pages: nothing to wait for layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves are of whole pages, when the step has ended: see ``wait_for_save``."""

    def wait_for_save(self) -> None:
        if self._worker_half is not None:
            self._worker_half.save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker_half is None:
            return None, None
        loaded = self._worker_half.finished_loads(self._orders())
        return None, loaded if loaded and self._settings.load == "async" else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker_half is None else self._worker_half.failed_block_ids()

    def build_connector_worker_meta(self) -> Any:
        return None if self._worker_half is None else self._worker_half.report()

    # Both

    def get_kv_connector_stats(self) -> OctavoStats | None:
        counts = self._counters.drain()
        return OctavoStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OctavoStats:
        return OctavoStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OctavoPromMetrics:
        return OctavoPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler_half is not None:
            self._scheduler_half.close()
        if self._worker_half is not None:
            self._worker_half.close()

    def _make_client(self, layout: Layout) -> Client:
        return Client(
            self._settings.address,
            layouts=[layout],
            namespaces=self._settings.all_namespaces,
        )

    def _event_log(self, vllm_config: Any) -> EventLog | None:
        events = getattr(vllm_config, "kv_events_config", None)
        if events is None or not events.enable_kv_cache_events:
            return None
        shards = ShardMap(self._layout, self._kv.tp)
        return EventLog(
            self._kv.block_tokens, self._layout.page_tokens, self._kv.tp // shards.replicas
        )

    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_half is not None, "not the scheduler's half"
        return self._scheduler_half

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders
