"""A layout says everything that decides what a model's pages mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.transformers.tiny import hf

from octavo.transformers import UnsupportedModel, checkpoint_revision, kv_layout


def layout_of(model: Any, **changes: Any) -> Any:
    return kv_layout(model, "tiny", model_id="tiny", weights_revision="1", **changes)


def test_layout_has_the_models_shape(model: Any) -> None:
    layout = layout_of(model)
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (3, 2, 8)
    assert layout.dtype == "float32"
    assert layout.raw_page_bytes == 3 * 2 * 2 * 8 * 16 * 4


def test_dtype_and_revision_change_the_fingerprint(model: Any) -> None:
    layout = layout_of(model)
    other = kv_layout(model, "tiny", model_id="tiny", weights_revision="2")
    half = hf.LlamaForCausalLM(model.config).to(torch.float16)
    assert len({layout.fingerprint(), other.fingerprint(), layout_of(half).fingerprint()}) == 3


def test_rope_settings_change_the_fingerprint(model: Any) -> None:
    config = hf.LlamaConfig.from_dict(model.config.to_dict())
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    stretched = hf.LlamaForCausalLM(config)
    assert layout_of(stretched).fingerprint() != layout_of(model).fingerprint()


def test_sliding_window_is_refused() -> None:
    config = hf.MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=64,
    )
    with pytest.raises(UnsupportedModel, match="sliding"):
        layout_of(hf.MistralForCausalLM(config))


def test_revision_follows_a_single_flipped_bit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    before = checkpoint_revision(tmp_path)
    assert before == checkpoint_revision(tmp_path)
    weights.write_bytes(bytes(999) + b"\x01")
    assert checkpoint_revision(tmp_path) != before


def test_revision_of_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="safetensors"):
        checkpoint_revision(tmp_path)
