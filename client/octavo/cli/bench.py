"""``octavo bench``: measurements with their ceiling taken in the same run."""

from __future__ import annotations

import importlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli.errors import CommandError
from octavo.cli.extras import need_extra
from octavo.cli.rag import rag

app = typer.Typer(
    help="Measure Octavo on this machine, beside the machine's own ceiling.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class EnginePart(Enum):
    """What ``octavo bench engine`` can measure alone."""

    RESTART = "restart"
    MISSES = "misses"
    SCHEDULER = "scheduler"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Pairs = Annotated[
    int, typer.Option(min=1, max=1000, help="Pairs of a measurement and its ceiling.")
]


@app.command()
def local(pairs: Pairs = 15, as_json: Json = False) -> None:
    """Get, put and match through shared memory, beside torch's copy of the same bytes.

    Starts a node of its own and needs about 2 GB of memory.

    Examples:

      octavo bench local

      octavo bench local --json | tail -n 1 | jq .get_ratio
    """
    show_figures("bench local", measure("local", pairs=pairs), as_json=as_json)


@app.command()
def bulk(pairs: Pairs = 15, as_json: Json = False) -> None:
    """Get and put over plain TCP streams on loopback, beside plain blocking sockets.

    What workers without shared memory have. Starts a node of its own and needs about 2 GB.

    Examples:

      octavo bench bulk --json | tail -n 1 | jq .get_ratio
    """
    show_figures("bench bulk", measure("bulk", pairs=pairs), as_json=as_json)


@app.command()
def nvme(
    directory: Annotated[
        Path | None,
        typer.Option(help="On the device to measure; default: a temporary directory."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Reads and writes of the NVMe tier, beside plain O_DIRECT I/O, and recovery.

    Examples:

      octavo bench nvme --directory /mnt/nvme

      octavo bench nvme --json | tail -n 1 | jq .read_ratio
    """
    figures = dict(measure("nvme", directory=directory))
    if not as_json:
        del figures["series_ms"]
    show_figures("bench nvme", figures, as_json=as_json)


@app.command()
def codec(pairs: Pairs = 15, as_json: Json = False) -> None:
    """Bytes, speed on one thread and error of every codec, beside torch's own FP8 cast.

    Examples:

      octavo bench codec

      octavo bench codec --json | tail -n 1 | jq .codecs.int8.bias
    """
    figures = dict(measure("codec", pairs=pairs))
    if as_json:
        show_figures("bench codec", figures, as_json=True)
        return
    with need_extra("cli"):
        from octavo.cli.codec_table import show_codecs
    codecs: Any = figures.pop("codecs")
    show_figures("bench codec", figures, as_json=False)
    show_codecs(codecs)


@app.command()
def start(as_json: Json = False) -> None:
    """Time from exec to SERVING, and the memory of an empty node.

    Examples:

      octavo bench start --json
    """
    show_figures("bench start", measure("start"), as_json=as_json)


@app.command()
def engine(
    engine: Annotated[Literal["vllm"], typer.Option(help="The engine to measure with.")] = "vllm",
    pairs: Annotated[
        int, typer.Option(min=2, max=1000, help="Pairs of requests with and without Octavo.")
    ] = 24,
    prompt_tokens: Annotated[
        int, typer.Option(min=512, max=16384, help="Tokens of each prompt.")
    ] = 2048,
    model: Annotated[
        Path | None,
        typer.Option(help="A checkpoint's folder; default: the demo's.", show_default=False),
    ] = None,
    in_process: Annotated[
        bool, typer.Option(help="Scheduler and worker in the engine's first process.")
    ] = False,
    part: Annotated[
        list[EnginePart] | None,
        typer.Option(help="Measure this alone; can be given again.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """A real engine: prompts after its restart, prompts that miss, and its scheduler's thread.

    Needs vLLM, in this environment or in .venv-engines, and about 8 GB of memory.

    Examples:

      octavo bench engine --engine vllm

      octavo bench engine --part misses --pairs 40 --json | tail -n 1 | jq .miss_ratio
    """
    with need_engine():
        figures = measure(
            "engine",
            engine=engine,
            pairs=pairs,
            prompt_tokens=prompt_tokens,
            model=model,
            in_process=in_process,
            parts=[each.value for each in part or EnginePart],
        )
    show_figures("bench engine", figures, as_json=as_json)


app.command()(rag)


@app.command()
def index(
    pages: Annotated[
        int, typer.Option(min=40_000, max=20_000_000, help="Pages in the index.")
    ] = 1_000_000,
    cluster_servers: Annotated[
        int, typer.Option(min=0, max=16, help="Servers of the Redis Cluster; 0: leave it out.")
    ] = 3,
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, help="Matches that a median is taken of.")
    ] = 60,
    redis_server: Annotated[
        Path | None,
        typer.Option(help="The server's program; default: on PATH.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """The prefix index on a real Redis: memory, publishing and looking up, beside idle scripts.

    Starts Redis servers of its own on loopback, without disk.

    Examples:

      octavo bench index

      octavo bench index --json | tail -n 1 | jq .publish_pages_per_s
    """
    with need_extra("dev"):
        from octavo.bench.redis_servers import NoRedisServerError
    try:
        figures = measure(
            "index",
            pages=pages,
            cluster_servers=cluster_servers,
            repeats=repeats,
            redis_server=redis_server,
        )
    except NoRedisServerError as error:
        raise CommandError(str(error)) from None
    if as_json:
        show_figures("bench index", figures, as_json=True)
        return
    cluster: Any = figures.get("cluster", {})
    rest = {name: value for name, value in figures.items() if name != "cluster"}
    show_figures("bench index", rest, as_json=False)
    if cluster:
        show_figures(f"bench index, cluster of {cluster_servers}", cluster, as_json=False)


def measure(name: str, **options: object) -> Mapping[str, object]:
    """Runs ``octavo.bench.<name>.run(**options)``.

    Raises:
        CommandError: there is no such benchmark, or it needs a package that is missing.
    """
    with need_extra("dev"):
        try:
            module = importlib.import_module(f"octavo.bench.{name}")
        except ModuleNotFoundError as error:
            if error.name in ("octavo.bench", f"octavo.bench.{name}"):
                raise CommandError(f"this installation has no benchmark {name!r}") from None
            raise
    figures: Mapping[str, object] = module.run(**options)
    return figures


@contextmanager
def need_engine() -> Generator[None]:
    """Raises CommandError if there is no engine to measure with."""
    with need_extra("dev"):
        from octavo.bench.vllm_child import NoEngineError
    try:
        yield
    except NoEngineError as error:
        raise CommandError(str(error)) from None


def show_figures(title: str, figures: Mapping[str, object], *, as_json: bool) -> None:
    """Prints one JSON object as the last line, or a table."""
    if as_json:
        print(json.dumps(figures), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", title=title, title_justify="left")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
