"""A change of any tensor changes the digest; a copy of the folder does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from octavo.vllm.weights import weights_digest


def checkpoint(folder: Path, changed: str = "") -> Path:
    folder.mkdir()
    tensors = {f"layer{number}": torch.full((300, 300), float(number)) for number in range(9)}
    if changed:
        tensors[changed] = tensors[changed] + 1
    cast("Any", safetensors.torch).save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_any_tensor_counts(tmp_path: Path) -> None:
    digests = {
        weights_digest(checkpoint(tmp_path / name, name if name != "none" else ""))
        for name in ("none", *(f"layer{number}" for number in range(9)))
    }
    assert len(digests) == 10


def test_a_copy_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a")
    shutil.copytree(first, tmp_path / "b" / "c")
    assert weights_digest(first) == weights_digest(tmp_path / "b" / "c")


def test_the_configuration_counts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a")
    before = weights_digest(folder)
    (folder / "config.json").write_text('{"rope_theta": 5}')
    assert weights_digest(folder) != before


def test_other_formats_are_sampled_all_over(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(1 << 20))
    before = weights_digest(tmp_path)
    with path.open("r+b") as file:
        file.seek(500_000)
        file.write(bytes([1]) * 4096)
    assert weights_digest(tmp_path) != before


def test_a_broken_header_is_sampled_instead_of_believed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert len(weights_digest(tmp_path)) == 32


def test_no_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        weights_digest(tmp_path)
