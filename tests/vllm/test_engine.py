"""What an engine's configuration says, and which engines are refused. Stand-ins have the
attributes of vLLM's objects that are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import KvKind
from octavo.vllm.engine import describe, layer_order
from octavo.vllm.errors import EngineRefused
from octavo.vllm.layouts import layout_of
from octavo.vllm.settings import ConnectorSettings

SETTINGS = ConnectorSettings(weights_revision="r1")


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


def engine(**changes: Any) -> tuple[Any, Any]:
    """A Llama of 12 layers on two ranks. ``changes`` name attributes by path, ``_`` for dots."""
    spec = FullAttentionSpec(
        block_size=32, head_size=64, head_size_v=64, tokens_per_state=1, num_kv_heads=4
    )
    group = SimpleNamespace(
        layer_names=[f"model.layers.{layer}.self_attn.attn" for layer in (*range(2, 12), 0, 1)],
        kv_cache_spec=spec,
    )
    model = SimpleNamespace(
        model="org/llama",
        dtype="torch.bfloat16",
        quantization=None,
        revision="main",
        seed=0,
        hf_config=SimpleNamespace(_commit_hash="abc"),
        hf_text_config=SimpleNamespace(rope_theta=1e4, rope_scaling=None),
        get_total_num_kv_heads=lambda: 8,
    )
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    kv = SimpleNamespace(kv_cache_groups=[group])
    for name, value in changes.items():
        if name == "groups":
            kv.kv_cache_groups = value
        elif name == "spec":
            group.kv_cache_spec = value
        else:
            part, _, attribute = name.partition("__")
            setattr(getattr(config, part), attribute, value)
    return config, kv


def described(**changes: Any) -> Any:
    settings, form = changes.pop("settings", SETTINGS), changes.pop("form", "")
    return describe(*engine(**changes), settings, form)


def test_an_engine_is_described_with_layers_in_the_order_of_the_model() -> None:
    kv = described()
    assert kv.layer_names[2] == "model.layers.2.self_attn.attn"
    assert kv.layer_names[-1] == "model.layers.11.self_attn.attn"
    layout = layout_of(kv, SETTINGS, 0)
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (12, 8, 64)
    assert (layout.dtype, layout.page_tokens, layout.physical_form) == ("bfloat16", 16, "canonical")
    assert layout.head_parts == 2


def test_layer_names_sort_by_their_numbers() -> None:
    assert sorted(["a.10.x", "a.9.x"], key=layer_order) == ["a.9.x", "a.10.x"]


def test_the_layout_of_two_epochs_has_one_name() -> None:
    kv = described()
    first, second = layout_of(kv, SETTINGS, 0), layout_of(kv, SETTINGS, 7)
    assert first.name == second.name
    assert first.fingerprint() != second.fingerprint()


def test_an_engine_of_another_size_has_another_layout_unless_both_state_both_sizes() -> None:
    narrow = FullAttentionSpec(block_size=32, head_size=64, num_kv_heads=2)
    two, four = described(), described(parallel_config__tensor_parallel_size=4, spec=narrow)
    assert layout_of(two, SETTINGS, 0) != layout_of(four, SETTINGS, 0)
    both = ConnectorSettings(weights_revision="r1", tp_sizes=(2, 4))
    assert layout_of(two, both, 0) == layout_of(four, both, 0)


def test_latents_are_mla() -> None:
    spec = MLAAttentionSpec(block_size=64, head_size=576, head_size_v=0, tokens_per_state=1)
    kv = described(
        spec=spec,
        model_config__hf_text_config=SimpleNamespace(qk_rope_head_dim=64, rope_theta=1e4),
    )
    assert (kv.kind, kv.kv_heads, kv.head_dim, kv.rope_dim) == (KvKind.MLA, 1, 512, 64)


def test_fp8_keeps_its_type_and_says_where_scales_come_from() -> None:
    kv = described(cache_config__cache_dtype="fp8_e5m2")
    assert (kv.dtype, kv.kv_scales) == ("float8_e5m2", "checkpoint")


def test_an_opaque_page_is_a_whole_block() -> None:
    config, kv_config = engine()
    kv = describe(config, kv_config, SETTINGS, "opaque:x")
    layout = layout_of(kv, SETTINGS, 0)
    assert (layout.page_tokens, layout.physical_form) == (32, "opaque:x")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "must be 'recompute'"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context"),
        ({"groups": []}, "0 KV groups"),
        (
            {"groups": [SimpleNamespace(kv_cache_spec=FullAttentionSpec())] * 2},
            "2 KV groups .*disable_hybrid_kv_cache_manager",
        ),
        ({"parallel_config__tensor_parallel_size": 4}, "8 KV heads, its cache 4 on each of 4"),
        ({"spec": SlidingWindowSpec(block_size=32, head_size=64)}, "SlidingWindowSpec"),
        ({"cache_config__cache_dtype": "nvfp4"}, "kv_cache_dtype is 'nvfp4'"),
        (
            {
                "cache_config__cache_dtype": "fp8",
                "cache_config__calculate_kv_scales": True,
            },
            "calculate_kv_scales",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineRefused, match=named):
        described(**changes)


def test_a_drafter_with_kv_of_its_own_is_refused() -> None:
    config, kv = engine()
    config.speculative_config = SimpleNamespace(method="eagle3")
    with pytest.raises(EngineRefused, match="eagle3"):
        describe(config, kv, SETTINGS, "")
    config.speculative_config = SimpleNamespace(method="ngram")
    describe(config, kv, SETTINGS, "")


def test_pages_that_do_not_divide_the_block_are_refused() -> None:
    settings = ConnectorSettings(weights_revision="r1", page_tokens=64)
    with pytest.raises(EngineRefused, match="page_tokens is 64, must divide"):
        layout_of(described(), settings, 0)


def test_an_engine_whose_blocks_cannot_be_packed_refuses_a_profile_that_packs() -> None:
    best = ConnectorSettings(weights_revision="r1", profile="best")
    opaque = described(form="opaque:test")
    with pytest.raises(EngineRefused, match="profile is 'best', must be 'exact'"):
        layout_of(opaque, best, 0)
    layout_of(described(), best, 0)
    layout_of(opaque, ConnectorSettings(weights_revision="r1", profile="raw"), 0)


def test_weights_are_named_by_the_hubs_commit_or_not_at_all() -> None:
    assert described(settings=ConnectorSettings()).weights_revision == "abc"
    with pytest.raises(EngineRefused, match="set revision"):
        described(
            settings=ConnectorSettings(),
            model_config__hf_config=SimpleNamespace(),
            model_config__revision=None,
        )


def test_a_folder_without_weights_needs_a_revision(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="set weights_revision"):
        described(settings=ConnectorSettings(), model_config__model=str(tmp_path))
