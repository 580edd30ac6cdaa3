"""``octavo plan``: what a model's KV takes, where it fits, how fast it comes back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from octavo.cli.errors import CommandError
from octavo.cli.extras import need_extra

if TYPE_CHECKING:
    from octavo.plan import ModelShape, PlanRequest
    from octavo.plan.hardware import Gpu

EXIT_USAGE: Final = 2
GB: Final = 10**9
DEFAULT_CODEC: Final = "fp8_e5m2"
"""That of profile ``general``."""


def plan(
    model: Annotated[
        str,
        typer.Option(help="A known model, a config.json, or a folder that has one."),
    ] = "llama-3.1-8b",
    context: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of a session.")] = 32_768,
    concurrency: Annotated[
        int, typer.Option(min=1, max=10**7, help="Sessions whose KV shall be in memory.")
    ] = 64,
    nvme_sessions: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Sessions on NVMe. Default: as many as in memory."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Nodes that share them.")] = 1,
    codec: Annotated[
        str | None,
        typer.Option(help="The codec or profile whose figures lead. Default: fp8_e5m2."),
    ] = None,
    page_tokens: Annotated[int, typer.Option(min=16, max=256, help="Tokens of a page.")] = 16,
    tp: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Default: the fewest GPUs that hold a session."),
    ] = None,
    pp: Annotated[int, typer.Option(min=1, max=64, help="Pipeline stages.")] = 1,
    dp: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Groups of TP x PP GPUs that share a set of experts."),
    ] = 1,
    gpu: Annotated[str, typer.Option(help="Sets HBM and speed; see docs/sizing.md.")] = "h200",
    hbm_gb: Annotated[
        float | None,
        typer.Option(min=1, max=10_000, help="HBM of a GPU in 10^9 bytes. Default: the GPU's."),
    ] = None,
    hbm_share: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Part of HBM for weights and KV.")
    ] = 0.9,
    weight_bits: Annotated[
        int | None, typer.Option(min=1, max=32, help="Default: as the model is published.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="The engine's own KV type. Default: the model's.")
    ] = None,
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Part of peak that a prefill reaches.")
    ] = 0.5,
    prefill_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Tokens/s measured on your engine; better than the estimate."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw into this file (.png, .svg, .pdf).")
    ] = None,
    list_models: Annotated[
        bool, typer.Option("--list-models", help="List the known models and stop.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
) -> None:
    """Size a deployment: bytes, sessions a GPU, memory, NVMe, and load against recompute.

    Examples:

      octavo plan --model llama-3.3-70b --context 131072 --concurrency 256

      octavo plan --model ./checkpoint/config.json --gpu h100 --tp 4 --codec int8

      octavo plan --model deepseek-v3 --tp 1 --dp 8 --plot deepseek.png

      octavo plan --model qwen2.5-72b --json | tail -n 1 | jq .codecs.int8.sessions_per_gpu

      octavo plan --list-models
    """
    from octavo.plan import PlanRequest

    if list_models:
        _list_models(as_json=as_json)
        return
    request = PlanRequest(
        model=_chosen_model(model),
        context_tokens=context,
        session_count=concurrency,
        nvme_session_count=nvme_sessions,
        node_count=nodes,
        page_tokens=page_tokens,
        tp=tp,
        pp=pp,
        dp=dp,
        gpu=_chosen_gpu(gpu, hbm_gb),
        hbm_share=hbm_share,
        weight_bits=weight_bits,
        kv_dtype=kv_dtype,
        prefill_efficiency=efficiency,
        prefill_tokens_per_s=prefill_rate,
    )
    _show_plan(request, codec, as_json=as_json, plot=plot)


def _show_plan(
    request: PlanRequest, codec: str | None, *, as_json: bool, plot: Path | None
) -> None:
    """Prints a plan, and draws it into the file ``plot``.

    Raises:
        CommandError: it cannot be made, or the model's KV has no such codec.
    """
    from octavo.cli.plan_tables import print_plan
    from octavo.codec import PROFILES
    from octavo.plan import PlanError, make_plan
    from octavo.plan.codec_bytes import RAW
    from octavo.plan.report import figures

    try:
        plan = make_plan(request)
    except PlanError as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    if codec is None:
        # KV that the engine keeps in 8 bits has codec raw alone.
        codec = DEFAULT_CODEC if DEFAULT_CODEC in plan.codecs else RAW
    codec = PROFILES.get(codec, codec)
    if codec not in plan.codecs:
        raise CommandError(
            f"codec {codec!r}: {request.model.name} with KV in {plan.layout.dtype} has "
            f"{', '.join(plan.codecs)}",
            EXIT_USAGE,
        )
    if plot is not None:
        with need_extra("plots"):
            from octavo.plan.plot import draw_plan
        try:
            draw_plan(plan, codec, plot)
        except (OSError, ValueError) as error:  # ValueError: an ending that it cannot draw
            raise CommandError(f"cannot draw {plot}: {error}", EXIT_USAGE) from None
    if as_json:
        print(json.dumps(figures(plan, codec)), flush=True)
    else:
        print_plan(plan, codec)


def _chosen_model(name: str) -> ModelShape:
    """The model of a configuration file or folder, else the known one of that name.

    Raises:
        CommandError: there is none, or it cannot be sized.
    """
    from octavo.plan import KNOWN_MODELS, UnsupportedModel, find_model, read_model

    path = Path(name)
    if path.exists():
        try:
            return read_model(path)
        except (OSError, UnsupportedModel) as error:
            raise CommandError(f"{name}: {error}", EXIT_USAGE) from None
    model = find_model(name)
    if model is None:
        raise CommandError(
            f"{name!r} is neither a config.json or its folder nor one of the known models: "
            f"{', '.join(KNOWN_MODELS)}",
            EXIT_USAGE,
        )
    return model


def _chosen_gpu(name: str, hbm_gb: float | None) -> Gpu:
    """Raises CommandError: no such GPU is known."""
    from octavo.plan.hardware import GPUS

    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise CommandError(
            f"gpu {name!r}: known are {', '.join(GPUS)}; for another, take the nearest in speed "
            "and give --hbm-gb",
            EXIT_USAGE,
        )
    return gpu if hbm_gb is None else replace(gpu, hbm_bytes=int(hbm_gb * GB))


def _list_models(*, as_json: bool) -> None:
    from octavo.cli.plan_tables import print_models
    from octavo.plan import KNOWN_MODELS

    if not as_json:
        print_models(KNOWN_MODELS.values())
        return
    rows = [
        {
            "model": model.name,
            "kind": model.kind.name,
            "parameters": model.parameters,
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "rope_dim": model.rope_dim,
            "bytes_per_token": model.raw_token_bytes,
        }
        for model in KNOWN_MODELS.values()
    ]
    print(json.dumps({"models": rows}), flush=True)
