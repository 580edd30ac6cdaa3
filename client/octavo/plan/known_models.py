"""Well-known models by name. Tests hold their weights against the published counts."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from octavo.plan.model import Experts, LatentAttention, ModelShape

_DEEPSEEK_HEADS: Final = LatentAttention(query_rank=1536, nope_dim=128, value_dim=128)


def _dense(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocabulary: int,
    *,
    head_dim: int = 128,
    shares_embedding: bool = False,
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        vocabulary=vocabulary,
        shares_embedding=shares_embedding,
    )


def _mixture(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    *,
    experts: int,
    active: int,
    width: int,
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        mlp_width=0,
        vocabulary=vocabulary,
        experts=Experts(count=experts, active=active, width=width, layers=layers),
    )


_MODELS: Final = (
    _dense("smollm2-135m", 30, 576, 9, 3, 1536, 49152, head_dim=64, shares_embedding=True),
    _dense("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, head_dim=64, shares_embedding=True),
    _dense("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, shares_embedding=True),
    _dense("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256),
    _dense("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256),
    _dense("llama-3.3-70b", 80, 8192, 64, 8, 28672, 128256),
    _dense("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
    _dense("mistral-7b-v0.3", 32, 4096, 32, 8, 14336, 32768),
    _dense("phi-4", 40, 5120, 40, 10, 17920, 100352),
    _dense("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
    _dense("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064),
    _dense("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064),
    _dense("qwen3-8b", 36, 4096, 32, 8, 12288, 151936),
    _dense("qwen3-32b", 64, 5120, 64, 8, 25600, 151936),
    _mixture("qwen3-30b-a3b", 48, 2048, 32, 4, 151936, experts=128, active=8, width=768),
    _mixture("qwen3-235b-a22b", 94, 4096, 64, 4, 151936, experts=128, active=8, width=1536),
    _mixture("mixtral-8x7b", 32, 4096, 32, 8, 32000, experts=8, active=2, width=14336),
    _mixture("mixtral-8x22b", 56, 6144, 48, 8, 32768, experts=8, active=2, width=16384),
    ModelShape(
        name="deepseek-v2-lite",
        layers=27,
        hidden=2048,
        heads=16,
        kv_heads=1,
        head_dim=512,
        rope_dim=64,
        mlp_width=10944,
        vocabulary=102400,
        latent=LatentAttention(query_rank=0, nope_dim=128, value_dim=128),
        experts=Experts(count=64, active=6, width=1408, shared_width=2 * 1408, layers=26),
    ),
    ModelShape(
        name="deepseek-v3",
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=1,
        head_dim=512,
        rope_dim=64,
        mlp_width=18432,
        vocabulary=129280,
        latent=_DEEPSEEK_HEADS,
        experts=Experts(count=256, active=8, width=2048, shared_width=2048, layers=58),
        weight_bits=8,
    ),
    ModelShape(
        name="kimi-k2",
        layers=61,
        hidden=7168,
        heads=64,
        kv_heads=1,
        head_dim=512,
        rope_dim=64,
        mlp_width=18432,
        vocabulary=163840,
        latent=_DEEPSEEK_HEADS,
        experts=Experts(count=384, active=8, width=2048, shared_width=2048, layers=60),
        weight_bits=8,
    ),
)

KNOWN_MODELS: Final = MappingProxyType({model.name: model for model in _MODELS})


def find_model(name: str) -> ModelShape | None:
    """A known model by its name, in any case and with or without its publisher and ending:
    ``llama-3.3-70b``, ``meta-llama/Llama-3.3-70B-Instruct``."""
    wanted = name.rpartition("/")[2].lower()
    for ending in ("-instruct", "-it", "-chat", "-base"):
        wanted = wanted.removesuffix(ending)
    return KNOWN_MODELS.get(wanted)
