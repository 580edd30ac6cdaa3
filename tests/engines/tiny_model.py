"""A Llama of 11 MB with random weights, the same on each machine; a checkpoint vLLM can load."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = ROOT / ".cache" / "engines"
FOLDER_NAME: Final = "tiny-llama-1"
"""The last number is raised when the model changes; the seed's follows."""

VOCABULARY_SIZE: Final = 1024
WEIGHT_STD: Final = {
    "embed_tokens": 1.0,
    "q_proj": 0.12,
    "k_proj": 0.12,
    "v_proj": 0.1,
    "o_proj": 0.1,
    "lm_head": 0.2,
}
"""Queries and keys are wide, so that attention picks out a few tokens each time and the answer
hangs on every block of KV: with 0.05 throughout, one wrong block of nine changed no token."""

MAKE_TIMEOUT_S: Final = 120.0


def ensure_tiny_model(seed: int = 0) -> Path:
    """The model's folder, made first if need be. It has no tokenizer: prompts are token ids."""
    folder = CACHE / f"{FOLDER_NAME}-{seed}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=CACHE) as work:
            making = Path(work) / folder.name
            # In a process of its own: whoever runs tests needs neither torch nor transformers.
            command = [sys.executable, "-m", __name__, str(making), str(seed)]
            subprocess.run(command, cwd=ROOT, check=True, timeout=MAKE_TIMEOUT_S)
            # Another process may have been faster: then its folder stays and ours goes.
            with contextlib.suppress(OSError):
                making.rename(folder)
    return folder


def make(folder: Path, seed: int) -> None:
    """Writes configuration and float32 weights."""
    import torch
    import transformers

    hf: Any = transformers
    config = hf.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=16384,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = hf.LlamaForCausalLM(config).float()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                kind = name.removesuffix(".weight").rpartition(".")[2]
                weights.normal_(0.0, WEIGHT_STD.get(kind, 0.05), generator=random)
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
