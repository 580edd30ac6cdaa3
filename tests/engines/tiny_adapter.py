"""A LoRA adapter for the tiny model, with random weights that change every answer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

# By name, for its parameters have types that the checkers do not know in full.
safetensors: Any = importlib.import_module("safetensors.numpy")

RANK: Final = 8
LAYERS: Final = 4
HIDDEN_SIZE: Final = 256
OUTPUT_SIZES: Final = {"q_proj": 256, "k_proj": 64, "v_proj": 64, "o_proj": 256}
WEIGHT_STD: Final = 0.15
"""The two factors' product then has a standard deviation of 0.06, half of the model's own."""


def make_adapter(folder: Path, seed: int) -> Path:
    """Writes it as PEFT does; the folder's name is the adapter's."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    weights: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    for layer in range(LAYERS):
        for name, output_size in OUTPUT_SIZES.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for factor, shape in (("A", (RANK, HIDDEN_SIZE)), ("B", (output_size, RANK))):
                drawn = random.normal(0.0, WEIGHT_STD, shape).astype(np.float32)
                weights[f"{place}.lora_{factor}.weight"] = drawn
    safetensors.save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(OUTPUT_SIZES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
