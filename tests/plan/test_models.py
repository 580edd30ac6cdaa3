"""Known models and configuration files: shapes and weights against what is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.plan import KNOWN_MODELS, UnsupportedModel, find_model, read_model
from octavo.plan.config_file import model_of

PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b-v0.3": 7_248_023_552,
    "phi-4": 14_659_507_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_000_000_000,
}

PUBLISHED_ACTIVE = {  # with embedding and output projection, in 10^9
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.1,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0,
    "deepseek-v3": 37.5,
    "kimi-k2": 32.6,
}

KIB_PER_TOKEN = {
    "llama-3.3-70b": 320.0,
    "qwen2.5-72b": 320.0,
    "mixtral-8x22b": 224.0,
    "llama-3.1-8b": 128.0,
    "deepseek-v3": 68.625,
    "smollm2-135m": 22.5,
}

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
MIXTRAL: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32768,
    "sliding_window": None,
}


def test_every_known_model_has_a_published_count() -> None:
    assert set(PUBLISHED_PARAMETERS) == set(KNOWN_MODELS)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_weights_are_those_published_within_a_thousandth(name: str) -> None:
    found = KNOWN_MODELS[name].parameters
    assert found == pytest.approx(PUBLISHED_PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize("name", PUBLISHED_ACTIVE)
def test_only_active_experts_compute(name: str) -> None:
    model = KNOWN_MODELS[name]
    embeddings = model.vocabulary * model.hidden * 2
    active = (model.prefill_parameters + embeddings) / 1e9
    assert active == pytest.approx(PUBLISHED_ACTIVE[name], rel=0.02)


@pytest.mark.parametrize("name", KIB_PER_TOKEN)
def test_kv_of_a_token(name: str) -> None:
    assert KNOWN_MODELS[name].raw_token_bytes == KIB_PER_TOKEN[name] * 1024


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama-3.3-70b", "llama-3.3-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen3-235B-A22B", "qwen3-235b-a22b"),
    ],
)
def test_models_are_found_by_the_names_people_use(name: str, found: str) -> None:
    model = find_model(name)
    assert model is not None
    assert model.name == found


def test_unknown_models_are_not_guessed() -> None:
    assert find_model("llama-3.3-71b") is None


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA_8B, "llama-3.1-8b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (QWEN3_30B, "qwen3-30b-a3b"),
        (MIXTRAL, "mixtral-8x22b"),
    ],
)
def test_a_configuration_file_says_the_same_as_the_table(
    config: dict[str, Any], name: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    known = KNOWN_MODELS[name]
    for path in (folder, folder / "config.json"):
        read = read_model(path)
        assert read.parameters == known.parameters
        assert read.prefill_parameters == known.prefill_parameters
        assert read.weight_bits == known.weight_bits
        assert read.layout(16, read.kv_dtype) == known.layout(16, known.kv_dtype)


def test_weights_beside_the_configuration_are_weighed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for name, size in (("model-1", 700), ("model-2", 300), ("consolidated", 1000)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    model = read_model(tmp_path)
    assert model.weight_bytes() == 1000
    assert model.weight_bytes(8) == model.parameters


def test_the_text_part_of_a_model_with_several_is_sized() -> None:
    inner = {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"}
    model = model_of({"text_config": inner, "dtype": "float16"}, name="m")
    assert (model.layers, model.kv_heads, model.kv_dtype) == (32, 8, "float16")


def test_heads_without_groups_are_all_kv_heads() -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert model_of(config, name="m").kv_heads == 32
    assert model_of({**config, "multi_query": True}, name="m").kv_heads == 1


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "gptq", "bits": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}, 4),
    ],
)
def test_bits_of_quantised_weights(settings: dict[str, Any] | None, bits: int) -> None:
    assert model_of({**LLAMA_8B, "quantization_config": settings}, name="m").weight_bits == bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"mamba_d_state": 128}, "state-space"),
        ({"num_kv_shared_layers": 10}, "share KV"),
    ],
)
def test_what_cannot_be_paged_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        model_of({**LLAMA_8B, **change}, name="m")


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "\x00"])
def test_files_that_are_no_configuration_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UnsupportedModel, match="JSON"):
        read_model(path)
