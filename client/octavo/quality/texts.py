"""Texts to score: eight of our own in the package, or the user's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from octavo.quality.errors import QualityError


@dataclass(frozen=True, slots=True)
class Text:
    """A text and the name under which its figures are reported."""

    name: str
    content: str


def committed_texts() -> tuple[Text, ...]:
    """Prose, a manual, a chat, maths, two programs, German and French, in order of name.

    Each has at least 1,600 tokens in the vocabulary of SmolLM2. They were written for this
    purpose, so that no model has seen them.
    """
    found = [
        Text(entry.name.removesuffix(".txt"), entry.read_text(encoding="utf-8"))
        for entry in files("octavo.quality").joinpath("texts").iterdir()
        if entry.name.endswith(".txt")
    ]
    return tuple(sorted(found, key=lambda text: text.name))


def choose_texts(wanted: Sequence[str]) -> tuple[Text, ...]:
    """Texts by the names of committed ones, by files, and by folders of ``*.txt``.

    Files are named by their stems. Nothing wanted means all committed texts.

    Raises:
        QualityError: no such text, it is no UTF-8, or two have one name.
    """
    committed = {text.name: text for text in committed_texts()}
    if not wanted:
        return tuple(committed.values())
    chosen: dict[str, Text] = {}
    for item in wanted:
        found = [committed[item]] if item in committed else _read(Path(item), committed)
        for text in found:
            if text.name in chosen:
                raise QualityError(f"two texts are called {text.name}")
            chosen[text.name] = text
    return tuple(chosen.values())


def _read(path: Path, committed: dict[str, Text]) -> Iterator[Text]:
    inside = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not inside:
        raise QualityError(f"no .txt file in {path}")
    for file in inside:
        try:
            yield Text(file.stem, file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            names = ", ".join(committed)
            raise QualityError(f"no file {file}, and no committed text: {names}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise QualityError(f"cannot read {file}: {error}") from None
