"""The command's work: choose, measure with a progress bar, show."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from octavo.demo.checkpoint import MODEL_ID, CheckpointError, ensure_checkpoint
from octavo.quality.errors import QualityError
from octavo.quality.figures import codec_table, summary, text_table
from octavo.quality.measuring import Measured, measure, step_count
from octavo.quality.model import open_subject
from octavo.quality.schemes import Scheme, choose_schemes
from octavo.quality.texts import Text, choose_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure, as it was asked for."""

    model: Path | None
    texts: tuple[str, ...]
    codecs: tuple[str, ...] | None
    prefix_tokens: int
    score_tokens: int
    rounds: int
    page_tokens: int


def run_quality(request: Request, *, plot: Path | None, to_stderr: bool) -> dict[str, Any]:
    """Measures, prints tables (with ``to_stderr``, not to stdout), and returns the figures.

    Raises:
        QualityError: something of the request does not fit.
    """
    console = Console(stderr=to_stderr, highlight=False)
    texts = choose_texts(request.texts)
    schemes = choose_schemes(request.codecs)
    if request.prefix_tokens % request.page_tokens:
        raise QualityError(
            f"--prefix is {request.prefix_tokens}, must be a multiple of {request.page_tokens}, "
            "the tokens of a page"
        )
    begin = time.perf_counter()
    thread_count = len(os.sched_getaffinity(0))
    torch.set_num_threads(thread_count)
    model_name, folder = _checkpoint(request.model, console)
    measured = _measure(folder, texts, schemes, request)
    about = {
        "model": model_name,
        "page_tokens": request.page_tokens,
        "threads": thread_count,
        "torch": str(torch.__version__),
        "elapsed_s": round(time.perf_counter() - begin, 1),
    }
    console.print(codec_table(measured))
    by_text = text_table(measured)
    if console.measure(by_text).maximum <= console.width:  # cut figures would help nobody
        console.print(by_text)
    console.print(
        f"{model_name}: {request.prefix_tokens} tokens packed, the next {request.score_tokens} "
        f"scored, {len(texts)} texts, {about['elapsed_s']:.0f} s",
        style="dim",
    )
    if plot is not None:
        # Imported here: without a plot, nobody needs matplotlib.
        from octavo.quality.plot import draw

        try:
            draw(measured, f"KV of {model_name}, packed and unpacked", plot)
        except OSError as error:
            raise QualityError(f"cannot write {plot}: {error.strerror or error}") from None
        console.print(f"drawn: {plot}", style="dim")
    return summary(measured, about)


def _checkpoint(folder: Path | None, console: Console) -> tuple[str, Path]:
    """The model's name and folder; ours is made if need be."""
    if folder is not None:
        return folder.resolve().name, folder
    try:
        made = ensure_checkpoint(lambda text: console.print(text, style="dim"))
    except CheckpointError as error:
        raise QualityError(str(error)) from None
    return MODEL_ID, made


def _measure(
    folder: Path, texts: tuple[Text, ...], schemes: tuple[Scheme, ...], request: Request
) -> Measured:
    hf: Any = transformers
    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("loading the model", total=step_count(texts, schemes))
        subject = open_subject(
            folder,
            page_tokens=request.page_tokens,
            token_count=request.prefix_tokens + request.score_tokens + 1,
        )

        def report(doing: str, steps_done: int) -> None:
            bar.update(task, description=doing, completed=steps_done)

        return measure(
            subject,
            texts,
            schemes,
            prefix_tokens=request.prefix_tokens,
            score_tokens=request.score_tokens,
            rounds=request.rounds,
            report=report,
        )
