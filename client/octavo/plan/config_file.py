"""A model's shape from its ``config.json``, as checkpoints of the transformers library have it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from octavo.plan.model import Experts, LatentAttention, ModelShape
from octavo_proto.layout import DTYPE_BYTES

CONFIG_BYTES_MAX: Final = 16 << 20
"""A configuration is some kilobytes; a larger file is something else."""

FULL_ATTENTION: Final = "full_attention"

_OTHER_STATE: Final = {
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "linear_num_value_heads": "linear-attention layers",
    "hybrid_override_pattern": "layers of several kinds",
    "index_head_dim": "an index of its own beside the latents",
    "num_kv_shared_layers": "layers that share KV",
}
"""Keys of models that keep something else than the full KV of every layer."""

Config = Mapping[str, Any]


class UnsupportedModel(ValueError):  # noqa: N818 - says what is wrong; "Error" would add nothing
    """The file is no configuration, or the model's state cannot be cut into pages."""


def read_model(path: Path) -> ModelShape:
    """The model of a ``config.json``, or of a folder that has one.

    With the weights beside it (safetensors), their bytes are those of the files.

    Raises:
        UnsupportedModel: names what is missing or cannot be sized.
        OSError: the file cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    if file.stat().st_size > CONFIG_BYTES_MAX:
        raise UnsupportedModel(f"{file} is larger than any configuration")
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{file} is not JSON: {error}") from None
    config = _object(loaded)
    if config is None:
        raise UnsupportedModel(f"{file} is not a JSON object")
    folder = file.parent.resolve()
    # Some publishers keep the same weights twice, under another name.
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    weights = sum(each.stat().st_size for each in files)
    return model_of(config, name=folder.name or "model", weight_bytes_on_disk=weights or None)


def model_of(config: Config, *, name: str, weight_bytes_on_disk: int | None = None) -> ModelShape:
    """The model that ``config`` describes. Raises UnsupportedModel: see ``read_model``."""
    outer = config
    if "num_hidden_layers" not in config:
        config = _object(config.get("text_config")) or config
    _refuse_other_state(config)
    layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    is_latent = bool(config.get("kv_lora_rank"))
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if is_latent else _kv_heads(config, heads),
        head_dim=_count(config, "kv_lora_rank")
        if is_latent
        else _count(config, "head_dim", hidden // heads),
        rope_dim=_count(config, "qk_rope_head_dim") if is_latent else 0,
        latent=_latent(config) if is_latent else None,
        mlp_width=_count(config, "intermediate_size"),
        vocabulary=_count(config, "vocab_size"),
        shares_embedding=bool(
            config.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))
        ),
        experts=_experts(config, layers),
        kv_dtype=_dtype(config, outer),
        weight_bits=_weight_bits(config, outer),
        weight_bytes_on_disk=weight_bytes_on_disk,
    )


def _object(value: object) -> Config | None:
    """``value`` if it is a JSON object."""
    return cast("Config", value) if isinstance(value, dict) else None


def _refuse_other_state(config: Config) -> None:
    for key, what in _OTHER_STATE.items():
        if config.get(key):
            raise UnsupportedModel(f"{key} is set: {what} cannot be sized as pages")
    odd = set(config.get("layer_types") or ()) - {FULL_ATTENTION}
    if odd:
        raise UnsupportedModel(f"layers of type {', '.join(sorted(odd))} cannot be paged")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise UnsupportedModel("a sliding window drops KV that pages need")


def _count(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise UnsupportedModel(f"{key} is {value!r}, must be a positive number")
    return value


def _kv_heads(config: Config, heads: int) -> int:
    for key in ("num_key_value_heads", "num_kv_heads"):
        if config.get(key) is not None:
            return _count(config, key)
    return 1 if config.get("multi_query") else heads


def _latent(config: Config) -> LatentAttention:
    return LatentAttention(
        query_rank=_count(config, "q_lora_rank", 0),
        nope_dim=_count(config, "qk_nope_head_dim"),
        value_dim=_count(config, "v_head_dim"),
    )


def _experts(config: Config, layers: int) -> Experts | None:
    for key in ("n_routed_experts", "num_local_experts", "num_experts"):
        if config.get(key):
            count = _count(config, key)
            break
    else:
        return None
    width = _count(config, "moe_intermediate_size", _count(config, "intermediate_size"))
    shared_width = _count(config, "shared_expert_intermediate_size", 0)
    if config.get("n_shared_experts"):
        shared_width = _count(config, "n_shared_experts") * width
    step = _count(config, "decoder_sparse_step", _count(config, "moe_layer_freq", 1))
    first = config.get("first_k_dense_replace") or 0
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    offset = 1 if "decoder_sparse_step" in config else 0  # counted from 1 there, from 0 elsewhere
    sparse = [
        layer
        for layer in range(layers)
        if layer >= first and layer not in dense and (layer + offset) % step == 0
    ]
    return Experts(
        count=count,
        active=_count(config, "num_experts_per_tok"),
        width=width,
        shared_width=shared_width,
        layers=len(sparse),
    )


def _dtype(config: Config, outer: Config) -> str:
    for source in (config, outer):
        for key in ("dtype", "torch_dtype"):
            name = str(source.get(key) or "").removeprefix("torch.")
            if name in DTYPE_BYTES:
                return name
    return "bfloat16"


def _weight_bits(config: Config, outer: Config) -> int:
    """Bits a parameter, nearly: scales and what is left unquantised are not counted."""
    settings = _object(config.get("quantization_config"))
    settings = settings or _object(outer.get("quantization_config"))
    if not settings:
        return 8 * DTYPE_BYTES[_dtype(config, outer)]
    bits = settings.get("bits")  # GPTQ, AWQ
    if not bits:
        # compressed-tensors says it deep inside; the first group stands for all.
        found = re.search(r"'num_bits': (\d+)", str(settings.get("config_groups")))
        bits = int(found[1]) if found else None
    if isinstance(bits, int) and 0 < bits <= 32:
        return bits
    method = f"{settings.get('quant_method')} {settings.get('quant_algo')}".lower()
    is_four = bool(settings.get("load_in_4bit")) or "fp4" in method
    return 4 if is_four else 8
