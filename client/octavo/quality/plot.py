"""KL against bytes, and KL by text, as one picture. Importing it needs ``octavo[plots]``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

from octavo.quality.figures import text_names
from octavo.quality.measuring import Measured, SchemeResult
from octavo.quality.scoring import Score

COLOURS: Final = {"cast": "#9a9a9a", "fp8": "#c8553d", "int": "#2a6f97"}
OTHER_COLOUR: Final = "#588157"
FORMATS: Final = (".svg", ".png", ".pdf")
SIZE_INCHES: Final = (11.0, 4.6)
KL_FLOOR: Final = 1e-9
"""Where a scheme that loses nothing is drawn on a logarithmic axis."""


matplotlib: Any = importlib.import_module("matplotlib")
"""Its types are too loose to be checked strictly."""

matplotlib.use("Agg")  # files only: no display is needed


def check_target(target: Path) -> None:
    """Says early what ``draw`` would find out late.

    Raises:
        ValueError: a file of that name cannot be drawn there.
    """
    if target.suffix not in FORMATS:
        raise ValueError(f"plot {target}: the name must end in {', '.join(FORMATS)}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"plot {target}: there is no such folder")


def draw(measured: Measured, title: str, target: Path) -> None:
    """Writes the picture; the file's ending chooses the format (svg, png, pdf).

    Raises:
        OSError: the file cannot be written.
    """
    # The same run draws the same file: no date, and ids that do not change.
    with matplotlib.rc_context({"svg.hashsalt": "octavo", "font.size": 9}):
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        figure, (by_bytes, by_text) = pyplot.subplots(1, 2, figsize=SIZE_INCHES, layout="tight")
        _draw_by_bytes(by_bytes, measured)
        _draw_by_text(by_text, measured)
        figure.suptitle(title, x=0.01, ha="left")
        metadata = {"Date": None} if target.suffix == ".svg" else None
        figure.savefig(target, dpi=150, metadata=metadata)
        pyplot.close(figure)


def _draw_by_bytes(axes: Any, measured: Measured) -> None:
    for name, result in measured.schemes.items():
        axes.scatter(result.bytes_ratio, _drawn_kl(result.score), color=_colour(name), zorder=3)
        axes.annotate(
            name,
            (result.bytes_ratio, _drawn_kl(result.score)),
            xytext=(6, 4),
            textcoords="offset points",
        )
    axes.set_yscale("log")
    axes.set_xlim(0.3, 1.15)
    axes.margins(y=0.12)
    axes.set_xlabel("bytes, bf16 = 1 (raw first page included)")
    axes.set_ylabel("KL of the next token, nats")
    axes.set_title("left and down is better", loc="left", fontsize=9)
    axes.grid(alpha=0.3)


def _draw_by_text(axes: Any, measured: Measured) -> None:
    names = list(measured.schemes)
    texts = text_names(measured)
    for row, name in enumerate(names):
        result: SchemeResult = measured.schemes[name]
        values = [_drawn_kl(result.by_text[text]) for text in texts]
        axes.scatter(values, [row] * len(values), color=_colour(name), s=14, zorder=3)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("KL of the next token, nats")
    axes.set_title(f"each of {len(texts)} texts", loc="left", fontsize=9)
    axes.grid(alpha=0.3)


def _drawn_kl(score: Score) -> float:
    return max(score.kl, KL_FLOOR)


def _colour(name: str) -> str:
    return next(
        (colour for start, colour in COLOURS.items() if name.startswith(start)), OTHER_COLOUR
    )
