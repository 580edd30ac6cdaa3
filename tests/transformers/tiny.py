"""Small random models: the arithmetic of a real one, in milliseconds."""

from __future__ import annotations

import importlib
from typing import Any

import torch

hf: Any = importlib.import_module("transformers")
"""transformers, whose types are too loose to be checked strictly."""


def make_model(
    dtype: torch.dtype = torch.float32, *, vocabulary: int = 97, positions: int = 512
) -> Any:
    """A Llama of three layers with seeded random weights."""
    torch.manual_seed(7)  # pyright: ignore[reportUnknownMemberType]
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.6,
    )
    return hf.LlamaForCausalLM(config).to(dtype).eval()
