"""What an engine's configuration says about its KV, or why that cannot be served.

Reads vLLM's objects by attribute and imports nothing of it, so that it can be tested without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from octavo.vllm.errors import EngineRefused
from octavo.vllm.layouts import EngineKv
from octavo.vllm.settings import ConnectorSettings
from octavo.vllm.weights import weights_digest
from octavo_proto.layout import DTYPE_BYTES, KvKind

DRAFTERS_WITHOUT_KV: Final = frozenset({"ngram", "ngram_gpu", "suffix"})

CACHE_DTYPES: Final[Mapping[str, str]] = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""``kv_cache_dtype`` as layouts call it; ``auto`` is the model's own. Others keep scales inside
of a block or pack several values in a byte."""


def describe(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, opaque_form: str
) -> EngineKv:
    """The engine's only KV group. ``opaque_form`` is empty where blocks have canonical dims.

    Raises:
        EngineRefused: names what cannot be served, and what would do instead.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    check_policy(vllm_config.kv_transfer_config)
    _check_parallel(parallel)
    _check_drafter(getattr(vllm_config, "speculative_config", None))
    group = _only_group(kv_cache_config)
    spec = group.kv_cache_spec
    kind = _kind(spec)
    text_config = model.hf_text_config
    head_dim, rope_dim = int(spec.head_size), 0
    if kind is KvKind.MLA:
        rope_dim = int(getattr(text_config, "qk_rope_head_dim", 0))
        head_dim -= rope_dim
    elif getattr(spec, "head_size_v", None) not in (None, head_dim):
        raise EngineRefused(f"K has {head_dim} elements a head, V {spec.head_size_v}")
    tp, kv_heads = int(parallel.tensor_parallel_size), 1
    if kind is KvKind.GQA:
        kv_heads = int(model.get_total_num_kv_heads())
        if int(spec.num_kv_heads) != max(1, kv_heads // tp):
            raise EngineRefused(
                f"the model has {kv_heads} KV heads, its cache {spec.num_kv_heads} on each of "
                f"{tp} ranks: layers of different widths cannot be cut into pages"
            )
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return EngineKv(
        model=settings.model or _model_name(str(model.model)),
        weights_revision=settings.weights_revision or _revision(vllm_config),
        weights_quantisation=str(getattr(model, "quantization", None) or ""),
        kind=kind,
        layer_names=tuple(sorted(group.layer_names, key=layer_order)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        dtype=_dtype(cache_dtype, str(model.dtype)),
        kv_scales=_kv_scales(vllm_config.cache_config, cache_dtype),
        rope=rope_text(text_config),
        block_tokens=int(spec.block_size),
        opaque_form=opaque_form,
        tp=tp,
    )


def check_policy(transfer: Any) -> None:
    """Raises EngineRefused unless a failed load only costs its recomputation."""
    policy = getattr(transfer, "kv_load_failure_policy", None)
    if policy != "recompute":
        raise EngineRefused(
            f"kv_load_failure_policy is {policy!r}, must be 'recompute': a cache may lose what "
            "it had, and under any other policy that would fail the request"
        )


def layer_order(name: str) -> tuple[tuple[int, ...], str]:
    """Sorts layer names by the numbers in them: layer 10 comes after layer 9."""
    return tuple(int(number) for number in re.findall(r"\d+", name)), name


def rope_text(config: Any) -> str:
    """Rotary settings as canonical JSON. transformers 5 has them in one place, 4 in two."""
    settings = getattr(config, "rope_parameters", None) or {
        "rope_theta": getattr(config, "rope_theta", None),
        "rope_scaling": getattr(config, "rope_scaling", None),
    }
    return json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)


def _check_parallel(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise EngineRefused(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, must be 1: each stage "
            "would see only its own layers. Use tensor parallelism"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise EngineRefused(f"{name} is {size}, must be 1: it would cut pages by token")


def _check_drafter(speculative: Any) -> None:
    method = None if speculative is None else str(getattr(speculative, "method", ""))
    if method is not None and method not in DRAFTERS_WITHOUT_KV:
        raise EngineRefused(
            f"speculative method {method!r} keeps KV of its own, which pages do not have; "
            f"{', '.join(sorted(DRAFTERS_WITHOUT_KV))} do not"
        )


def _only_group(kv_cache_config: Any) -> Any:
    groups = cast("Sequence[Any]", kv_cache_config.kv_cache_groups)
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise EngineRefused(
            f"the model has {len(groups)} KV groups ({kinds or 'none'}), must be 1. Where windows "
            "are the reason, disable_hybrid_kv_cache_manager=True makes one group of them"
        )
    return groups[0]


def _kind(spec: Any) -> KvKind:
    names = {kind.__name__ for kind in type(spec).__mro__}
    odd = "SlidingWindow" in type(spec).__name__ or int(getattr(spec, "tokens_per_state", 1)) != 1
    if "FullAttentionSpec" not in names or odd:
        raise EngineRefused(
            f"KV of kind {type(spec).__name__} cannot be cut into pages of whole prefixes"
        )
    return KvKind.MLA if "MLAAttentionSpec" in names else KvKind.GQA


def _dtype(cache_dtype: str, model_dtype: str) -> str:
    dtype = CACHE_DTYPES.get(cache_dtype)
    if cache_dtype == "auto":
        dtype = model_dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise EngineRefused(
            f"kv_cache_dtype is {cache_dtype!r}, allowed: auto, {', '.join(CACHE_DTYPES)}"
        )
    return dtype


def _kv_scales(cache_config: Any, cache_dtype: str) -> str:
    """Where FP8 scales come from. They lie outside of the blocks, so they must be the weights'."""
    if not cache_dtype.startswith("fp8"):
        return ""
    if getattr(cache_config, "calculate_kv_scales", False):
        raise EngineRefused(
            "calculate_kv_scales makes scales of its own in each engine; pages would be read "
            "with other scales than they were written with"
        )
    return "checkpoint"


def _model_name(model: str) -> str:
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _revision(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if str(getattr(vllm_config.load_config, "load_format", "")) == "dummy":
        return f"dummy-{model.seed}"
    folder = Path(str(model.model))
    if folder.is_dir():
        try:
            return weights_digest(folder)
        except FileNotFoundError as error:
            raise EngineRefused(f"{error}: set weights_revision") from None
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not commit:
        raise EngineRefused(
            f"nothing tells which weights {model.model!r} has: set revision, or "
            "weights_revision in kv_connector_extra_config"
        )
    return str(commit)
