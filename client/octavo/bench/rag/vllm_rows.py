"""The workload in real vLLM engines: without any cache, with vLLM's own, with a node behind it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from octavo.bench.measuring import IdleShare, progress
from octavo.bench.rag.converse import converse
from octavo.bench.rag.loop import ClosedLoop
from octavo.bench.rag.rates import ServedTurn, percentile_ms, rates
from octavo.bench.rag.sources import connector_counts, read_sources
from octavo.bench.rag.workload import Workload
from octavo.bench.vllm_child import VllmChild, octavo_connector
from octavo.bench.vllm_jobs import Request
from octavo.local_node import LocalNode

NONE: Final = "none"
ENGINE_PREFIX: Final = "engine_prefix"
OCTAVO: Final = "octavo"

ROWS: Final = (NONE, ENGINE_PREFIX, OCTAVO)

DTYPE: Final = "float32"
"""What CPUs without matrix units for 16 bits are fastest with."""

WARM_UP_TOKENS: Final = 100
SLAB_PAGES: Final = 4
"""Pages of a slab of the node. By default slabs are a 64th of its memory, and a small memory would
have no slab that holds a page."""

SLABS_MIN: Final = 4
BYTES_STEP: Final = 4096
NVME_BYTES_MIN: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """What the rows have in common."""

    model: Path
    workload: Workload
    block_tokens: int
    block_bytes: int
    in_flight: int
    think_s: float
    memory_share: float
    """Of what all sessions need together, what the node's memory takes."""
    in_process: bool
    """Whether vLLM's scheduler and worker run in one process."""

    @property
    def engine_blocks(self) -> int:
        """Room for the requests in flight at their longest, and no more; and vLLM's null block."""
        blocks = -(-self.workload.longest_tokens // self.block_tokens) + 1
        return self.in_flight * blocks + 1

    @property
    def engine_share(self) -> float:
        """Of what all sessions need together, what the engine's cache takes."""
        return self.engine_blocks * self.block_tokens / self.workload.distinct_tokens

    @property
    def distinct_bytes(self) -> int:
        """What all sessions need together, without the rounding to blocks."""
        return self.workload.distinct_tokens * self.block_bytes // self.block_tokens


@dataclass(frozen=True, slots=True)
class Row:
    """What a row's engine did."""

    figures: Mapping[str, object]
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    """By session and turn."""


def run_row(name: str, plan: RowPlan) -> Row:
    """Starts what the row needs, runs the workload, and ends it all.

    Raises:
        EngineError: an engine failed.
        LocalNodeError: the node failed.
        RateError: the engine's figures contradict each other.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-rag-")))
        connector = None
        if name == OCTAVO:
            node = stack.enter_context(_node(plan, folder))
            node.start()
            connector = octavo_connector(node.address)
        options: dict[str, Any] = {
            "dtype": DTYPE,
            "block_size": plan.block_tokens,
            "kv_cache_memory_bytes": plan.engine_blocks * plan.block_bytes,
            "max_num_seqs": plan.in_flight,
            "max_model_len": plan.workload.longest_tokens + WARM_UP_TOKENS,
            "enable_prefix_caching": name != NONE,
        }
        child = VllmChild(
            plan.model,
            folder / "engine.log",
            connector=connector,
            in_process=plan.in_process,
            **options,
        )
        engine = stack.enter_context(child)
        start_s = engine.start()
        return _measure(name, plan, engine, start_s)


def _node(plan: RowPlan, folder: Path) -> LocalNode:
    """A node with its default settings, but for sizes and place."""
    slab_bytes = -(-SLAB_PAGES * plan.block_bytes // BYTES_STEP) * BYTES_STEP
    memory = max(SLABS_MIN * slab_bytes, round(plan.memory_share * plan.distinct_bytes))
    return LocalNode(
        node_id="rag",
        memory_bytes=memory,
        slab_bytes=slab_bytes,
        nvme_dir=folder / "nvme",
        nvme_bytes=max(NVME_BYTES_MIN, 4 * plan.distinct_bytes),
        state_dir=folder / "state",
        log=folder / "node.log",
    )


def _measure(name: str, plan: RowPlan, engine: VllmChild, start_s: float) -> Row:
    # Other tokens than any session's: these begin with the ids that sessions leave out.
    engine.generate([Request(tuple(range(1, 1 + WARM_UP_TOKENS)), 4)])
    before = engine.metrics()
    workload = plan.workload
    loop = ClosedLoop(
        len(workload.sessions), len(workload.sessions[0].user_turns), plan.in_flight, plan.think_s
    )
    idle = IdleShare()
    served = list(progress(converse(workload, engine, loop), name, workload.turn_count))
    idle_share = idle.since()
    after = engine.metrics()
    served.sort(key=lambda turn: turn.issued_s)
    sources = read_sources(before, after, served, plan.block_tokens)
    found = rates(served, plan.block_tokens, sources.failed)
    duration_s = max(turn.ended_s for turn in served) - served[0].issued_s
    ttft_s = [turn.first_token_s - turn.issued_s for turn in served]
    figures: dict[str, object] = {
        "recompute_rate": round(found.recompute_rate, 5),
        "floor": round(found.floor, 5),
        "floor_alone": round(found.floor_alone, 5),
        "redundant": round(found.redundant, 5),
        "ttft_p50_ms": round(percentile_ms(ttft_s, 50), 1),
        "ttft_p90_ms": round(percentile_ms(ttft_s, 90), 1),
        "tokens_per_s": round(sum(len(turn.answer) for turn in served) / duration_s, 2),
        "duration_s": round(duration_s, 2),
        "start_s": round(start_s, 1),
        "machine_idle_share": round(idle_share, 3),
        "prompt_tokens": found.prompt_tokens,
        "hits": asdict(sources),
    }
    if name == OCTAVO:
        figures["connector"] = connector_counts(before, after)
    return Row(figures, _answers(served, len(workload.sessions)))


def _answers(served: list[ServedTurn], sessions: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(
        tuple(tuple(turn.answer) for turn in served if turn.session == session)
        for session in range(sessions)
    )
