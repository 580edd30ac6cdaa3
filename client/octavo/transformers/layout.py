"""The layout of a transformers model: read from its configuration, never guessed from tensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from octavo_proto.layout import KvKind, Layout

READ_BYTES: Final = 8 << 20
"""Weights are hashed in pieces of this size, so that a checkpoint never lies in memory twice."""

FULL_ATTENTION: Final = "full_attention"


class UnsupportedModel(ValueError):  # noqa: N818 - says what is wrong; "Error" would add nothing
    """The model keeps KV in a form that cannot be cut into pages; the message says which."""


class CausalModel(Protocol):
    """What is needed of a transformers model: its configuration and its element type."""

    @property
    def config(self) -> Any:
        """A ``PreTrainedConfig``; its attributes differ from family to family."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the parameters, and so of keys and values."""
        ...


def kv_layout(
    model: CausalModel,
    name: str,
    *,
    model_id: str,
    weights_revision: str,
    page_tokens: int = 16,
    head_parts: int = 1,
    layer_parts: int = 1,
) -> Layout:
    """The layout of the KV that ``model`` computes, in canonical form.

    ``weights_revision`` must differ whenever the weights do (see ``checkpoint_revision``): it
    is all that tells two models of one shape apart.

    Raises:
        UnsupportedModel: a layer keeps only a window of its KV, or no KV at all.
        LayoutError: a size is out of range.
    """
    config = model.config.get_text_config(decoder=True)
    odd_layers = set(getattr(config, "layer_types", None) or ()) - {FULL_ATTENTION}
    if odd_layers:
        raise UnsupportedModel(f"layers of type {', '.join(sorted(odd_layers))} cannot be paged")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel("a sliding window drops KV that pages need")
    heads = int(config.num_attention_heads)
    return Layout(
        name=name,
        model=model_id,
        weights_revision=weights_revision,
        kind=KvKind.GQA,
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype=str(model.dtype).removeprefix("torch."),
        rope=_rope_text(config),
        page_tokens=page_tokens,
        layer_parts=layer_parts,
        head_parts=head_parts,
    )


def checkpoint_revision(folder: Path) -> str:
    """A digest of a checkpoint's configuration and weights, 32 hexadecimal digits.

    Raises:
        FileNotFoundError: the folder has no ``config.json`` or no safetensors file.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / "config.json", *weights):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _rope_text(config: Any) -> str:
    """Rotary settings as canonical JSON. transformers 5 has them in one place, 4 in two."""
    settings = getattr(config, "rope_parameters", None)
    if not settings:
        settings = {
            "rope_theta": getattr(config, "rope_theta", None),
            "rope_scaling": getattr(config, "rope_scaling", None),
        }
    return json.dumps(settings, sort_keys=True, separators=(",", ":"))
