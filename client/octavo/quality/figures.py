"""The measurement as one JSON object and as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from rich.table import Table

from octavo.quality.measuring import Measured, SchemeResult
from octavo.quality.scoring import Score

YARDSTICK: Final = "cast_e4m3"
"""What other engines do to KV in 8 bits: a plain cast. KL is told in multiples of its KL."""

DIGITS: Final = 4


def summary(measured: Measured, about: Mapping[str, object]) -> dict[str, Any]:
    """The command's JSON object: ``codecs`` by name, then what belongs to it."""
    schemes = measured.schemes
    found: dict[str, Any] = {
        "codecs": {
            name: {**score_figures(result.score), "bytes_ratio": rounded(result.bytes_ratio)}
            for name, result in schemes.items()
        },
        "kl_over_cast_e4m3": {
            name: rounded(ratio)
            for name, result in schemes.items()
            if (ratio := kl_ratio(measured, result)) is not None
        },
        "texts": {
            text: {name: score_figures(result.by_text[text]) for name, result in schemes.items()}
            for text in text_names(measured)
        },
        "prefix_tokens": measured.prefix_tokens,
        "score_tokens": measured.score_tokens,
    }
    if measured.rounds > 1:
        found["rounds"] = {
            "count": measured.rounds,
            "codecs": {
                name: {
                    "kl": rounded(result.score_last.kl),
                    "kl_over_one_round": rounded(growth(result)),
                    "same_bits": result.is_stable,
                }
                for name, result in schemes.items()
            },
        }
    return found | dict(about)


def score_figures(score: Score) -> dict[str, float | None]:
    """Mean KL in nats a token, change of perplexity and equal first choices in per cent."""
    return {
        "kl": rounded(score.kl),
        "dppl_pct": rounded(score.dppl_pct),
        "top1_pct": rounded(score.top1_pct),
    }


def text_names(measured: Measured) -> tuple[str, ...]:
    """The texts, in the order in which they were scored."""
    results = list(measured.schemes.values())
    return tuple(results[0].by_text) if results else ()


def kl_ratio(measured: Measured, result: SchemeResult) -> float | None:
    """KL over that of the plain e4m3 cast, if that was measured and lost anything."""
    yardstick = measured.schemes.get(YARDSTICK)
    if yardstick is None or yardstick.score.kl <= 0:
        return None
    return result.score.kl / yardstick.score.kl


def growth(result: SchemeResult) -> float:
    """KL after the last round over that after the first: 1 if nothing decayed."""
    first, last = result.score.kl, result.score_last.kl
    return last / first if first > 0 else 1.0


def rounded(value: float) -> float | None:
    """Four significant digits: more would be noise of the texts. None (JSON's null) for what is
    no finite number: the scheme broke the model outright."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def codec_table(measured: Measured) -> Table:
    """A row a scheme."""
    table = Table(title="Quality of packed KV", title_justify="left")
    table.add_column("codec", no_wrap=True)
    headings = ["KL", "/ cast_e4m3", "dPPL", "top-1", "bytes"]
    if measured.rounds > 1:
        headings.append(f"x {measured.rounds}")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in measured.schemes.items():
        score = result.score
        ratio = kl_ratio(measured, result)
        cells = [
            f"{score.kl:.2e}",
            "" if ratio is None else f"{ratio:.3f}",
            f"{score.dppl_pct:+.3f} %",
            f"{score.top1_pct:.2f} %",
            f"{result.bytes_ratio:.3f}",
        ]
        if measured.rounds > 1:
            cells.append("same bits" if result.is_stable else f"x {growth(result):.2f}")
        table.add_row(name, *cells)
    return table


def text_table(measured: Measured) -> Table:
    """KL a token by text and scheme."""
    table = Table(title="KL by text", title_justify="left")
    table.add_column("text", no_wrap=True)
    for name in measured.schemes:
        table.add_column(name, justify="right", no_wrap=True)
    for text in text_names(measured):
        table.add_row(
            text, *(f"{result.by_text[text].kl:.1e}" for result in measured.schemes.values())
        )
    return table
