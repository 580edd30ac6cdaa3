"""Seeded keys, values and queries as attention meets them, to measure codecs with.

K is taken after its rotation, as caches hold it; head dim 128. Three kinds:

- ``benign``: every channel alike;
- ``outlier``: four channels twenty times as large as the others;
- ``bias``: constants added before the rotation to four channels, as the key bias of the Qwen2
  family does; one is some hundred times a channel's spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

HEAD_DIM: Final = 128
ROPE_BASE: Final = 1e6
KINDS: Final = ("benign", "outlier", "bias")
OUTLIERS: Final = (5, 40, 77, 110)
OUTLIER_FACTOR: Final = 20.0
BIAS: Final[Mapping[int, float]] = MappingProxyType({62: 380.0, 60: -150.0, 120: 60.0, 36: 25.0})


@dataclass(frozen=True)
class AttentionInputs:
    """bfloat16 keys and values ``[heads, tokens, 128]``, float32 queries of the same heads."""

    keys: Tensor
    values: Tensor
    queries: Tensor


def attention_inputs(
    kind: str, *, heads: int = 8, tokens: int = 512, query_count: int = 32, seed: int = 7
) -> AttentionInputs:
    """Keys at positions 0 and on, queries at the positions behind them.

    A query is built from a few of the keys, so that attention is neither flat nor on one token.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, allowed: {', '.join(KINDS)}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    plain = normal(heads, tokens, HEAD_DIM)
    keys = plain.clone()
    if kind == "outlier":
        keys[..., list(OUTLIERS)] *= OUTLIER_FACTOR
    if kind == "bias":
        for channel, bias in BIAS.items():
            keys[..., channel] += bias
    # Tokens differ in the size of their values, and a head's channels share some direction.
    sizes = torch.exp(0.5 * normal(heads, tokens, 1))
    values = (normal(heads, tokens, HEAD_DIM) + normal(heads, 1, HEAD_DIM)) * sizes
    wanted = torch.randint(0, tokens, (heads, query_count, 3), generator=generator)
    picked = torch.stack([plain[head][wanted[head]].sum(1) for head in range(heads)])
    queries = picked + normal(heads, query_count, HEAD_DIM)
    return AttentionInputs(
        rotated(keys, 0).to(torch.bfloat16),
        values.to(torch.bfloat16),
        rotated(queries, tokens),
    )


def rotated(vectors: Tensor, first_position: int) -> Tensor:
    """Rotary embedding, halves paired: channel i turns with channel i + 64."""
    half = HEAD_DIM // 2
    frequencies = ROPE_BASE ** -(torch.arange(half, dtype=torch.float64) / half)
    positions = torch.arange(vectors.shape[-2], dtype=torch.float64) + first_position
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    left, right = vectors[..., :half], vectors[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def centred_error(got: Tensor, given: Tensor) -> float:
    """Relative L2 of ``[heads, tokens, dim]``, without what all tokens of a channel share: a
    softmax does not see an offset that all keys have."""
    given, error = given.double(), got.double() - given.double()
    spread = given - given.mean(1, keepdim=True)
    return relative_norm(error - error.mean(1, keepdim=True), spread)


def relative_norm(part: Tensor, whole: Tensor) -> float:
    """L2 of one relative to the other's."""
    return float(part.pow(2).sum().sqrt() / whole.pow(2).sum().sqrt())


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention in float64, ``[heads, queries, dim]``."""
    scores = queries.double() @ keys.double().transpose(1, 2) / HEAD_DIM**0.5
    return torch.matmul(scores.softmax(-1), values.double())
