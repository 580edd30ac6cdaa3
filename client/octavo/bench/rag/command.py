"""``octavo bench rag``: which share of a chat's prompts is computed again, row by row."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from octavo.bench.rag.rates import RateError
from octavo.bench.rag.vllm_rows import DTYPE, NONE, ROWS, RowPlan, run_row
from octavo.bench.rag.workload import Lengths, make_workload, zipf_documents
from octavo.bench.vllm_child import engine_python
from octavo.demo.checkpoint import MODEL_ID, ensure_checkpoint
from octavo.plan import read_model


def run(
    *,
    model: Path | None = None,
    scale: float = 0.1,
    sessions: int = 8,
    turns: int = 6,
    documents: int = 8,
    zipf: float = 1.0,
    seed: int = 0,
    block_size: int = 32,
    in_flight: int = 3,
    think_s: float = 0.0,
    memory_share: float = 2.0,
    in_process: bool = False,
) -> Mapping[str, object]:
    """Figures by row, and whether the rows' answers are equal.

    Raises:
        RateError: the engine's cache would hold all sessions, or its figures contradict each other.
        CheckpointError: the default model could not be made.
        NoEngineError: there is no vLLM.
        EngineError, LocalNodeError: an engine or the node failed.
        UnsupportedModel: ``model`` is no model whose KV can be paged.
    """
    begin_s = time.monotonic()
    engine_python()  # says so at once if there is none
    folder = model or ensure_checkpoint(lambda text: print(text, file=sys.stderr))
    shape = read_model(folder)
    workload = make_workload(
        Lengths().scaled(scale),
        zipf_documents(sessions, documents, zipf, seed),
        turns,
        shape.vocabulary,
        seed,
    )
    plan = RowPlan(
        model=folder,
        workload=workload,
        block_tokens=block_size,
        block_bytes=shape.layout(block_size, DTYPE).raw_page_bytes,
        in_flight=in_flight,
        think_s=think_s,
        memory_share=memory_share,
        in_process=in_process,
    )
    if plan.engine_share >= 1:
        raise RateError(
            f"{in_flight} requests in flight need as much KV as all {sessions} sessions have: "
            "take more sessions or documents, or fewer requests in flight"
        )
    rows = {name: run_row(name, plan) for name in ROWS}
    return {
        "rows": {name: row.figures for name, row in rows.items()},
        "answers_equal": len({row.answers for row in rows.values()}) == 1,
        "distinct_answers": len({each for chat in rows[NONE].answers for each in chat}),
        "model": MODEL_ID if model is None else folder.resolve().name,
        "sessions": sessions,
        "turns": turns,
        "requests": workload.turn_count,
        "distinct_documents": len({session.document for session in workload.sessions}),
        "block_tokens": block_size,
        "in_flight": in_flight,
        "think_s": think_s,
        "engine_kv_share": round(plan.engine_share, 3),
        "node_memory_share": memory_share,
        "seed": seed,
        "elapsed_s": round(time.monotonic() - begin_s, 1),
    }
