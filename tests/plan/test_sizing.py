"""Plans: bytes, room, times and the rules of TP, PP and MLA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.plan import KNOWN_MODELS, Plan, PlanError, PlanRequest, make_plan
from octavo.plan.hardware import GPUS, LINKS
from octavo.plan.report import rules
from octavo.plan.sizing import SLOT_ALIGN_BYTES

TIB = 1 << 40
LLAMA_70B = PlanRequest(
    model=KNOWN_MODELS["llama-3.3-70b"], context_tokens=131_072, session_count=256
)
DEEPSEEK = PlanRequest(model=KNOWN_MODELS["deepseek-v3"], context_tokens=32_768, session_count=64)


def plan_of(
    request: PlanRequest = LLAMA_70B, changes: dict[str, Any] | None = None, **more: Any
) -> Plan:
    return make_plan(replace(request, **(changes or {}), **more))


def test_256_sessions_of_128k_of_a_70b_model_take_10_tib() -> None:
    raw = plan_of().codecs["raw"]
    assert raw.bytes_per_token == 327_680
    assert raw.total_bytes == 10 * TIB
    assert raw.page_bytes == 5 << 20


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("codec", ["fp8_e5m2", "fp8_e4m3", "int8"])
def test_8_bit_codecs_hold_18_sessions_where_raw_holds_10(gpu: str, codec: str) -> None:
    codecs = plan_of(gpu=GPUS[gpu]).codecs
    assert codecs["raw"].sessions_per_gpu > 0
    assert codecs[codec].sessions_per_gpu >= 1.8 * codecs["raw"].sessions_per_gpu


def test_deepseek_takes_656_bytes_a_token_and_layer() -> None:
    sizes = plan_of(DEEPSEEK).codecs["fp8_e4m3"]
    assert sizes.bytes_per_token_layer == 656
    assert sizes.bytes_per_token == 656 * 61


def test_a_last_page_that_is_not_full_counts_whole() -> None:
    plan = plan_of(context_tokens=33)
    assert plan.page_count == 3
    assert plan.codecs["raw"].sequence_bytes == 3 * plan.codecs["raw"].page_bytes
    sizes = plan.codecs["int8"]
    assert sizes.sequence_bytes == sizes.first_page_bytes + 2 * sizes.page_bytes


def test_first_page_is_raw_whatever_the_codec() -> None:
    plan = plan_of(context_tokens=16)
    assert {each.sequence_bytes for each in plan.codecs.values()} == {5 << 20}


@pytest.mark.parametrize(("tp", "share"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8)])
def test_a_rank_holds_its_heads_and_no_less_than_one(tp: int, share: int) -> None:
    raw = plan_of(tp=tp).codecs["raw"]
    assert raw.rank_sequence_bytes * share == raw.sequence_bytes


def test_stages_share_layers_as_evenly_as_they_can() -> None:
    raw = plan_of(tp=2, pp=3).codecs["raw"]
    assert raw.rank_sequence_bytes == raw.sequence_bytes // 2 * 27 // 80


def test_every_rank_holds_the_whole_latent_which_is_stored_once() -> None:
    one, eight = plan_of(DEEPSEEK, tp=1).codecs["raw"], plan_of(DEEPSEEK, tp=8).codecs["raw"]
    assert one.sequence_bytes == eight.sequence_bytes == eight.rank_sequence_bytes
    assert eight.total_bytes == 64 * 32_768 * 61 * 576 * 2


def test_room_is_what_weights_leave() -> None:
    plan = plan_of(tp=4, hbm_share=0.5, weight_bits=8)
    weights = plan.request.model.parameters
    assert plan.weight_bytes == weights
    assert plan.gpu_room_bytes == 141 * 10**9 // 2 - -(-weights // 4)
    raw = plan.codecs["raw"]
    assert raw.sessions_per_gpu == pytest.approx(plan.gpu_room_bytes / (raw.sequence_bytes / 4) / 4)


def test_groups_that_share_experts_leave_room_for_more_latents() -> None:
    ranks, groups = plan_of(DEEPSEEK, tp=8), plan_of(DEEPSEEK, tp=1, dp=8)
    model = DEEPSEEK.model
    rest = model.parameters - model.expert_parameters
    assert 0.97 < model.expert_parameters / model.parameters < 0.98
    assert groups.gpu_weight_bytes == pytest.approx(rest + model.expert_parameters / 8, abs=2)
    assert ranks.gpu_weight_bytes == pytest.approx(model.parameters / 8, abs=2)
    many, few = groups.codecs["int8"], ranks.codecs["int8"]
    assert many.sequence_bytes == few.sequence_bytes
    assert many.sessions_per_gpu > 4 * few.sessions_per_gpu


def test_groups_share_nothing_of_a_dense_model() -> None:
    one, many = plan_of(tp=4), plan_of(tp=4, dp=8)
    assert one.gpu_weight_bytes == many.gpu_weight_bytes
    assert one.codecs == many.codecs


def test_weights_that_leave_no_room_leave_no_session() -> None:
    plan = plan_of(tp=1)
    assert plan.gpu_room_bytes == 0
    assert {each.sessions_per_gpu for each in plan.codecs.values()} == {0.0}
    assert "no room" in rules(plan)[-1]


def test_tp_is_the_smallest_that_holds_a_session() -> None:
    assert plan_of().shards.tp == 2
    assert plan_of(context_tokens=1 << 20).shards.tp == 4
    assert plan_of(gpu=GPUS["h100"]).shards.tp == 4
    assert plan_of(model=KNOWN_MODELS["llama-3.1-8b"]).shards.tp == 1
    assert plan_of(model=KNOWN_MODELS["phi-4"], gpu=GPUS["a100-40gb"]).shards.tp == 2
    assert plan_of(DEEPSEEK).shards.tp == 8


def test_a_context_that_fits_nowhere_still_gets_a_plan() -> None:
    plan = plan_of(DEEPSEEK, context_tokens=1 << 24)
    assert plan.shards.tp == 8
    assert 0 < plan.codecs["raw"].sessions_per_gpu < 1


def test_memory_is_counted_in_whole_slots() -> None:
    request = replace(LLAMA_70B, model=KNOWN_MODELS["smollm2-135m"], context_tokens=48)
    plan = plan_of(request, session_count=3, nvme_session_count=30, tp=3)
    sizes = plan.codecs["int5"]
    slot = -(-sizes.page_bytes // 3 // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    raw_slot = plan.codecs["raw"].page_bytes // 3
    assert raw_slot % SLOT_ALIGN_BYTES == 0
    assert sizes.memory_bytes_per_node == 3 * 3 * (raw_slot + 2 * slot)
    assert sizes.nvme_bytes_per_node == 10 * sizes.memory_bytes_per_node


def test_nodes_share_what_is_stored() -> None:
    one, four = plan_of().codecs["int8"], plan_of(node_count=4).codecs["int8"]
    assert four.memory_bytes_per_node == -(-one.memory_bytes_per_node // 4)
    assert four.nvme_bytes_per_node == four.memory_bytes_per_node


def test_a_97k_prefix_comes_back_as_fast_as_links_allow() -> None:
    # 9.7K tokens of a 70B model: 1.59 GB at half of raw, 1.70 GB with scales and shifts.
    sizes = plan_of(context_tokens=9_700, tp=1).codecs["fp8_e5m2"]
    assert sizes.sequence_bytes == pytest.approx(1.59e9 * 0.535 / 0.5, rel=0.01)
    assert sizes.restore_s["pcie5_x16"] == pytest.approx(sizes.sequence_bytes / 50e9)
    assert sizes.restore_s["rdma_400g"] == pytest.approx(sizes.sequence_bytes / 48e9)
    assert sizes.restore_s["nvme_gen5"] == pytest.approx(sizes.sequence_bytes / 12e9)


def test_ranks_load_over_links_of_their_own() -> None:
    one, eight = plan_of(tp=1).codecs["raw"], plan_of(tp=8).codecs["raw"]
    assert eight.restore_s["pcie5_x16"] == pytest.approx(one.restore_s["pcie5_x16"] / 8)
    assert eight.restore_s["rdma_400g"] == one.restore_s["rdma_400g"]


def test_break_even_is_where_loading_takes_as_long_as_computing() -> None:
    plan = plan_of(prefill_tokens_per_s=2_000.0)
    assert plan.recompute_s == 131_072 / 2_000
    for sizes in plan.codecs.values():
        loaded_s = sizes.sequence_bytes / sizes.break_even_bytes_per_s
        assert loaded_s == pytest.approx(plan.recompute_s)


def test_prefill_takes_two_operations_a_weight_and_token_and_attention_on_top() -> None:
    model = KNOWN_MODELS["llama-3.1-8b"]
    linear = 2 * (model.parameters - 2 * 128_256 * 4_096) * 1_000
    attention = 4 * 32 * 4_096 * 1_000 * 1_000 // 2
    assert model.prefill_flops(1_000) == linear + attention
    request = replace(LLAMA_70B, model=model, context_tokens=1_000, tp=2)
    assert plan_of(request).recompute_s == pytest.approx((linear + attention) / (2 * 989e12 * 0.5))


def test_fp8_weights_compute_in_fp8_where_the_gpu_can() -> None:
    quick, slow = plan_of(tp=4, weight_bits=8), plan_of(tp=4, weight_bits=16)
    assert slow.recompute_s / quick.recompute_s == pytest.approx(1979 / 989)
    a100 = GPUS["a100-80gb"]
    assert plan_of(tp=4, weight_bits=8, gpu=a100).recompute_s == pytest.approx(
        plan_of(tp=4, weight_bits=16, gpu=a100).recompute_s
    )


def test_fp8_kv_of_the_engine_is_raw_at_half_the_bytes() -> None:
    plan = plan_of(kv_dtype="float8_e4m3fn")
    assert list(plan.codecs) == ["raw"]
    assert plan.codecs["raw"].total_bytes == 5 * TIB


def test_experts_change_nothing_of_the_kv() -> None:
    model = KNOWN_MODELS["mixtral-8x22b"]
    dense = replace(model, experts=None, mlp_width=1)
    mixed, alone = plan_of(model=model, tp=4), plan_of(model=dense, tp=4)
    assert mixed.codecs["int8"].total_bytes == alone.codecs["int8"].total_bytes
    assert any("EP changes none" in rule for rule in rules(mixed))
    assert not any("EP" in rule for rule in rules(alone))


@pytest.mark.parametrize(
    ("request_", "changes", "said"),
    [
        (LLAMA_70B, {"tp": 4}, "each rank holds 2 of 8 KV heads"),
        (LLAMA_70B, {"tp": 16}, "2 ranks hold each head"),
        (LLAMA_70B, {"tp": 2, "pp": 3}, "stages of 27, 27, 26 layers"),
        (DEEPSEEK, {"tp": 8}, "puts every 8th page"),
        (DEEPSEEK, {"tp": 1, "pp": 16}, "keeps it once."),
    ],
)
def test_rules_are_said(request_: PlanRequest, changes: dict[str, Any], said: str) -> None:
    assert said in " ".join(rules(plan_of(request_, changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "divisor or a multiple"),
        ({"pp": 81, "tp": 1}, "pp is 81"),
        ({"page_tokens": 24}, "page_tokens"),
        ({"kv_dtype": "fp8"}, "float8_e4m3fn"),
        ({"tp": 8, "pp": 16}, "more than 64 units"),
        ({"model": KNOWN_MODELS["kimi-k2"], "gpu": replace(GPUS["l40s"], hbm_bytes=10**9)}, "--pp"),
    ],
)
def test_plans_that_cannot_be_made_say_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(LLAMA_70B, changes)


def test_links_have_names_of_their_own() -> None:
    assert len({link.name for link in LINKS}) == len(LINKS)
