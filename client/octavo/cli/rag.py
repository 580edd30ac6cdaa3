"""``octavo bench rag``: its options, and what it says when it cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from octavo.cli.errors import CommandError
from octavo.cli.extras import need_extra

ENGINES: Final = ("vllm",)
EXIT_USAGE: Final = 2


def rag(
    engine: Annotated[
        str | None, typer.Option(help="What serves the chats: vllm.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a Hugging Face causal model. Default: SmolLM2-135M-Instruct, fetched "
            "the first time (about 100 MB).",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        float,
        typer.Option(
            min=0.01, max=10, help="Of the published lengths: 1,500, 8,000, 200 and 200 tokens."
        ),
    ] = 0.1,
    sessions: Annotated[int, typer.Option(min=2, max=1000, help="Chats.")] = 8,
    turns: Annotated[int, typer.Option(min=1, max=100, help="Questions of each chat.")] = 6,
    documents: Annotated[int, typer.Option(min=1, max=10_000, help="In the pool.")] = 8,
    zipf: Annotated[
        float,
        typer.Option(min=0, max=10, help="How uneven they are retrieved: 0 is evenly, 1 Zipf."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Draws documents, tokens and lengths.")] = 0,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of a block.")] = 32,
    in_flight: Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")] = 3,
    think_s: Annotated[
        float, typer.Option(min=0, max=3600, help="From an answer to the next question.")
    ] = 0.0,
    memory_share: Annotated[
        float,
        typer.Option(min=0.01, max=100, help="The node's memory over the KV of all chats."),
    ] = 2.0,
    in_process: Annotated[
        bool, typer.Option(help="Scheduler and worker in one process; starts sooner.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
) -> None:
    """Chats about retrieved documents in a real engine whose KV cache is too small for them.

    Three rows: none (no cache at all), engine_prefix (the engine's own), octavo (with a node of
    its own and the connector's default settings). Each says which share of the prompts' tokens was
    computed, which share had to be (floor), and what was redundant between the two: 0 is perfect,
    1 no cache. Ends with 1 if the rows' answers differ.

    Examples:

      octavo bench rag --engine vllm

      octavo bench rag --engine vllm --json | tail -n 1 | jq .rows.octavo.redundant

      octavo bench rag --engine vllm --sessions 16 --in-flight 4 --memory-share 0.5
    """
    if engine not in ENGINES:
        said = "needs --engine" if engine is None else f"has no engine {engine!r}"
        raise CommandError(f"bench rag {said}; there is: {', '.join(ENGINES)}", EXIT_USAGE)
    with need_extra("dev"):
        from octavo.bench.rag import run
        from octavo.bench.rag.rates import RateError
        from octavo.bench.vllm_child import EngineError, NoEngineError
        from octavo.cli.bench import show_figures
        from octavo.cli.rag_table import show_rows
        from octavo.demo.checkpoint import CheckpointError
        from octavo.local_node import LocalNodeError
        from octavo.plan import UnsupportedModel
    try:
        figures = dict(
            run(
                model=model,
                scale=scale,
                sessions=sessions,
                turns=turns,
                documents=documents,
                zipf=zipf,
                seed=seed,
                block_size=block_size,
                in_flight=in_flight,
                think_s=think_s,
                memory_share=memory_share,
                in_process=in_process,
            )
        )
    except (
        CheckpointError, EngineError, LocalNodeError, NoEngineError, OSError, RateError,
        UnsupportedModel,
    ) as error:  # fmt: skip
        raise CommandError(str(error)) from None
    answers_equal = figures["answers_equal"]
    if as_json:
        show_figures("bench rag", figures, as_json=True)
    else:
        rows: Any = figures.pop("rows")
        show_figures("bench rag", figures, as_json=False)
        show_rows(rows)
    if not answers_equal:
        raise CommandError("the rows' answers differ")
