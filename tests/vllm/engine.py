"""An engine without a model: real halves of the connector, real tensors, a real node.

Its "KV" of a token hangs on all tokens up to it, on layer and on head, as real KV does, so that
a page of another prefix, layer, head or block shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo import Client, KvKind, Layout
from octavo.shards import ShardMap
from octavo.vllm.blocks import Blocks
from octavo.vllm.canonical import Budget, CanonicalBlocks
from octavo.vllm.counting import Counters
from octavo.vllm.identity import RequestIdentity
from octavo.vllm.layouts import EngineKv, layout_of
from octavo.vllm.opaque import OpaqueBlocks, StagingRoom
from octavo.vllm.orders import StepOrders, WorkerReport
from octavo.vllm.params import RequestParams
from octavo.vllm.requests import NewRequest, ScheduledRequest
from octavo.vllm.scheduler import SchedulerSide
from octavo.vllm.settings import ConnectorSettings, Role
from octavo.vllm.worker import WorkerSide

LAYERS, HEADS, HEAD_DIM = 3, 4, 8
WEIGHTS = "1"
"""Revision of the weights; a fixture gives each test its own."""

ANSWER_S = 20.0
"""Longer than any deadline in here."""


def engine_kv(
    *, block_tokens: int = 32, tp: int = 1, opaque: bool = True, mla: bool = False
) -> EngineKv:
    """Three layers of small heads."""
    return EngineKv(
        model="test/model",
        weights_revision=WEIGHTS,
        kind=KvKind.MLA if mla else KvKind.GQA,
        layer_names=tuple(f"model.layers.{layer}.attn" for layer in range(LAYERS)),
        kv_heads=1 if mla else HEADS,
        head_dim=HEAD_DIM,
        rope_dim=4 if mla else 0,
        dtype="float32",
        block_tokens=block_tokens,
        opaque_form="opaque:test" if opaque else "",
        tp=tp,
    )


def kv_of(tokens: Sequence[int], heads: range, width: int) -> Tensor:
    """KV of all tokens: ``[layer, head, token, width]``."""
    prefix = np.cumsum(np.asarray(tokens, dtype=np.int64) * 2654435761 % 1_000_003) % 65_521
    values = torch.as_tensor(prefix, dtype=torch.float32)
    layer = torch.arange(LAYERS, dtype=torch.float32)[:, None, None, None]
    head = torch.tensor(list(heads), dtype=torch.float32)[None, :, None, None]
    element = torch.arange(width, dtype=torch.float32)[None, None, None, :]
    return values[None, None, :, None] + layer * 0.25 + head * 7.0 + element * 131.0


@dataclass
class Served:
    """What became of a request."""

    loaded_tokens: int
    failed_blocks: set[int]
    params: int
    """Pages on the node, or on the way there."""


@dataclass
class Engine:
    """A scheduler's half and a worker's half for each rank."""

    address: str
    kv: EngineKv
    settings: ConnectorSettings = field(default_factory=ConnectorSettings)
    role: Role = Role.BOTH
    block_count: int = 64
    strides: tuple[int, ...] = (0, 1, 2, 3)
    """Physical order of block, head, token and content."""

    def __post_init__(self) -> None:
        self.counters = Counters()
        self.counts: dict[str, int] = {}
        self.layout = layout_of(self.kv, self.settings, self.settings.weights_epoch)
        self.scheduler = SchedulerSide(
            self.settings,
            self.role,
            self.layout,
            self.kv.block_tokens,
            self.kv.tp,
            self.client,
            self.counters.add,
        )
        shards = ShardMap(self.layout, self.kv.tp)
        self.heads = [
            range(shards.shard(rank).held.head_begin, shards.shard(rank).held.head_end)
            for rank in range(self.kv.tp)
        ]
        self.tensors = [self._tensors(heads) for heads in self.heads]
        self.workers = [
            WorkerSide(
                self.settings,
                self.role,
                self.layout,
                (shards.shard(rank).replica, shards.replicas),
                self.client,
                self._maker(rank),
                self.counters.add,
            )
            for rank in range(self.kv.tp)
        ]
        self.next_block = 1
        self.request_count = 0

    def client(self, layout: Layout) -> Client:
        return Client(
            self.address, layouts=[layout], namespaces=self.settings.all_namespaces, timeout_s=5.0
        )

    def serve(
        self,
        tokens: Sequence[int],
        *,
        local_tokens: int = 0,
        identity: RequestIdentity | None = None,
        params: RequestParams | None = None,
    ) -> Served:
        """Serves a prompt: loads what is there, computes and saves the rest, checks all KV."""
        request_id = f"r{self.request_count}"
        self.request_count += 1
        self.scheduler.new_request(
            NewRequest(
                request_id,
                tokens,
                params or RequestParams(),
                identity or RequestIdentity(),
                may_load=True,
                may_save=True,
            )
        )
        block_ids = self._allocate(len(tokens))
        for rank in range(self.kv.tp):
            self._compute(rank, tokens, block_ids, 0, local_tokens)
        external = self._ask(request_id, tokens, local_tokens)
        self.scheduler.allocated(request_id, tokens, block_ids, external)
        failed = self._load(request_id, external)
        have = local_tokens + external
        if failed:
            have = min(block_ids.index(block) for block in failed) * self.kv.block_tokens
        self.check(tokens[:have], block_ids)
        for rank in range(self.kv.tp):
            self._compute(rank, tokens, block_ids, have, len(tokens))
        self._step(
            [ScheduledRequest(request_id, block_ids, True, len(tokens))], {request_id: tokens}
        )
        state = self.scheduler.request_ended(request_id)
        self._step([], {})
        assert state is not None
        return Served(external, failed, state.saved_pages)

    def drain(self) -> None:
        """Waits until everything is visible on the node."""
        from octavo.vllm import drain_saves

        assert drain_saves(timeout_s=ANSWER_S)

    def count(self, name: str) -> int:
        """A counter since the engine started."""
        for each, amount in self.counters.drain().items():
            self.counts[each] = self.counts.get(each, 0) + amount
        return self.counts.get(name, 0)

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def check(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """All blocks of these tokens hold their KV, on every rank."""
        size = self.kv.block_tokens
        for rank, heads in enumerate(self.heads):
            expected = kv_of(tokens, heads, self._width)
            for layer in range(LAYERS):
                for place in range(-(-len(tokens) // size)):
                    part = expected[layer, :, place * size : (place + 1) * size]
                    found = self.tensors[rank][layer][block_ids[place]][:, : part.shape[1]]
                    assert torch.equal(found, part), (rank, layer, place)

    @property
    def _width(self) -> int:
        is_mla = self.kv.kind is KvKind.MLA
        return self.kv.head_dim + self.kv.rope_dim if is_mla else 2 * self.kv.head_dim

    def _tensors(self, heads: range) -> list[Tensor]:
        shape = (self.block_count, len(heads), self.kv.block_tokens, self._width)
        physical = [shape[dim] for dim in self.strides]
        back = [self.strides.index(dim) for dim in range(4)]
        return [torch.full(physical, -1.0).permute(back) for _layer in range(LAYERS)]

    def _maker(self, rank: int) -> Callable[[Layout], Blocks]:
        shard = ShardMap(self.layout, self.kv.tp).shard(rank)
        room = StagingRoom(self.settings.staging_bytes)
        budget = Budget(self.settings.staging_bytes)

        def make(layout: Layout) -> Blocks:
            if self.kv.is_opaque:
                return OpaqueBlocks(layout, shard, self.tensors[rank], room)
            return CanonicalBlocks(
                layout, shard, self.tensors[rank], self.block_count, self.settings.profile, budget
            )

        return make

    def _allocate(self, token_count: int) -> list[int]:
        """Blocks in an order that no address arithmetic guesses by chance."""
        count = -(-token_count // self.kv.block_tokens)
        order = [(each * 7) % self.block_count for each in range(self.block_count)]
        block_ids = [order[(self.next_block + each) % self.block_count] for each in range(count)]
        self.next_block += count
        return block_ids

    def _compute(
        self, rank: int, tokens: Sequence[int], block_ids: Sequence[int], begin: int, end: int
    ) -> None:
        kv = kv_of(tokens[:end], self.heads[rank], self._width)
        for token in range(begin, end):
            block, slot = divmod(token, self.kv.block_tokens)
            for layer in range(LAYERS):
                self.tensors[rank][layer][block_ids[block], :, slot] = kv[layer, :, token]

    def _ask(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> int:
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            external = self.scheduler.matched_tokens(request_id, tokens, local_tokens)
            if external is not None:
                return external
            assert time.monotonic() < deadline_s, "the match has no end"
            self._step([], {})

    def _load(self, request_id: str, external: int) -> set[int]:
        failed: set[int] = set()
        finished: set[int] = set()
        deadline_s = time.monotonic() + ANSWER_S
        while external and len(finished) < self.kv.tp:
            for rank, (ids, blocks) in enumerate(self._step([], {})):
                if request_id in ids:
                    finished.add(rank)
                failed |= blocks
            assert time.monotonic() < deadline_s, "the load has no end"
        return failed

    def _step(
        self, scheduled: list[ScheduledRequest], tokens: dict[str, Sequence[int]]
    ) -> list[tuple[set[str], set[int]]]:
        """One step of the engine; by rank, which loads ended and which blocks failed."""
        step_tokens = sum(each.computed_tokens for each in scheduled)
        orders = self.scheduler.step_orders(scheduled, tokens.get, step_tokens, ())
        results = [self._work(worker, orders) for worker in self.workers]
        reports = WorkerReport()
        for worker in self.workers:
            report = worker.report()
            if report is not None:
                reports.aggregate(report)
        self.scheduler.step_ended()
        self.scheduler.worker_report(reports)
        return results

    def _work(self, worker: WorkerSide, orders: StepOrders) -> tuple[set[str], set[int]]:
        worker.before_forward(orders)
        worker.start_loads(orders)
        worker.save(orders)
        return worker.finished_loads(orders), worker.failed_block_ids()
