"""The committed texts, and choosing others."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from octavo.demo.checkpoint import ensure_checkpoint
from octavo.quality import QualityError, choose_texts, committed_texts

TOKENS_MIN = 1600
CHARACTERS_MIN = 4800
"""What 1,600 tokens come to in the densest of the texts."""


def test_there_are_eight_texts_of_the_kinds_that_are_served() -> None:
    names = {text.name for text in committed_texts()}
    assert len(names) >= 8
    assert {"prose", "chat", "maths", "python", "rust", "german", "french"} <= names


def test_texts_are_long_enough_and_differ() -> None:
    texts = committed_texts()
    assert min(len(text.content) for text in texts) >= CHARACTERS_MIN
    lines = [line for text in texts for line in text.content.splitlines() if len(line) > 80]
    assert len(set(lines)) == len(lines), "no line of length comes twice"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_texts_have_1600_tokens_of_the_default_model() -> None:
    file = ensure_checkpoint(print) / "tokenizer.json"
    tokenizers: Any = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    for text in committed_texts():
        assert len(tokenizer.encode(text.content).ids) >= TOKENS_MIN, text.name


def test_nothing_wanted_means_all() -> None:
    assert choose_texts(()) == committed_texts()


def test_names_files_and_folders_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("eins")
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "two.txt").write_text("zwei")
    (folder / "ignored.md").write_text("-")
    chosen = choose_texts(("chat", str(tmp_path / "one.txt"), str(folder)))
    assert [text.name for text in chosen] == ["chat", "one", "two"]
    assert [text.content for text in chosen[1:]] == ["eins", "zwei"]


def test_wrong_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match=r"no file .*poem.*chat, french"):
        choose_texts(("poem",))
    with pytest.raises(QualityError, match=r"no \.txt file"):
        choose_texts((str(tmp_path),))
    (tmp_path / "chat.txt").write_text("another chat")
    with pytest.raises(QualityError, match="two texts are called chat"):
        choose_texts(("chat", str(tmp_path / "chat.txt")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(QualityError, match=r"cannot read .*latin"):
        choose_texts((str(tmp_path / "latin.txt"),))
