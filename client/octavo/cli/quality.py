"""``octavo quality``: what packing does to a real model's next tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from octavo.cli.errors import CommandError
from octavo.cli.extras import need_extra

EXIT_USAGE: Final = 2

Model = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a Hugging Face causal model. Default: SmolLM2-135M-Instruct, fetched "
        "the first time (about 100 MB).",
        show_default=False,
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        help="A file, a folder of .txt files, or one of our own texts by name; may be repeated. "
        "Default: our own eight.",
        show_default=False,
    ),
]
Codecs = Annotated[
    str | None,
    typer.Option(help="Names with commas between. Default: all.", show_default=False),
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw into this file (.svg, .png, .pdf).", show_default=False),
]


def quality(
    model: Model = None,
    texts: Texts = None,
    codecs: Codecs = None,
    prefix: Annotated[
        int, typer.Option(min=16, max=1 << 20, help="Tokens whose KV is packed.")
    ] = 1024,
    score: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Tokens after it that are scored.")
    ] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="How often to pack and unpack in a row.")
    ] = 1,
    page_tokens: Annotated[int, typer.Option(min=16, max=256, help="Tokens of a page.")] = 16,
    plot: Plot = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
) -> None:
    """Measure what each codec costs: pack a prefix's KV, and score what follows.

    KL is that of the next-token distributions against KV that was never packed, in nats a
    token; dPPL is the change of perplexity; bytes are relative to KV in bf16.

    Examples:

      octavo quality

      octavo quality --model ./my-model --texts ./my-texts --plot quality.svg

      octavo quality --codecs int8,fp8_e4m3,cast_e4m3 --rounds 10

      octavo quality --json | tail -n 1 | jq .codecs.int8
    """
    with need_extra("demo"):
        from octavo.quality import QualityError
        from octavo.quality.run import Request, run_quality
    if plot is not None:
        # First of all: nobody should wait for minutes to hear of a missing package.
        with need_extra("plots"):
            from octavo.quality.plot import check_target
        try:
            check_target(plot)
        except ValueError as error:
            raise CommandError(str(error), EXIT_USAGE) from None
    request = Request(
        model=model,
        texts=tuple(texts or ()),
        codecs=None if codecs is None else tuple(codecs.split(",")),
        prefix_tokens=prefix,
        score_tokens=score,
        rounds=rounds,
        page_tokens=page_tokens,
    )
    try:
        figures = run_quality(request, plot=plot, to_stderr=as_json)
    except QualityError as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    if as_json:
        print(json.dumps(figures), flush=True)
