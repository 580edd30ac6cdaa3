"""A plan as one JSON object, and the rules that its figures follow."""

from __future__ import annotations

from dataclasses import asdict

from octavo.plan.codec_bytes import RAW
from octavo.plan.hardware import LINKS
from octavo.plan.sizing import CodecSizes, Plan
from octavo_proto.layout import KvKind


def figures(plan: Plan, codec: str) -> dict[str, object]:
    """One JSON object: the chosen codec's figures at the top, every codec's under ``codecs``."""
    request, layout = plan.request, plan.layout
    return {
        "model": request.model.name,
        "kind": layout.kind.name,
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "rope_dim": layout.rope_dim,
        "dtype": layout.dtype,
        "parameters": request.model.parameters,
        "context_tokens": request.context_tokens,
        "concurrency": request.session_count,
        "page_tokens": layout.page_tokens,
        "pages_per_sequence": plan.page_count,
        "tp": plan.shards.tp,
        "pp": plan.shards.pp,
        "dp": request.dp,
        "kv_replicas": plan.shards.replicas,
        "layer_parts": layout.layer_parts,
        "head_parts": layout.head_parts,
        "gpu": request.gpu.name,
        "hbm_bytes": request.gpu.hbm_bytes,
        "weight_bytes": plan.weight_bytes,
        "weight_bytes_per_gpu": plan.gpu_weight_bytes,
        "kv_room_bytes_per_gpu": plan.gpu_room_bytes,
        "nodes": request.node_count,
        "recompute_s": plan.recompute_s,
        "links": {
            link.name: {"bytes_per_s": link.bytes_per_s, "is_per_gpu": link.is_per_gpu}
            for link in LINKS
        },
        "codec": codec,
        **codec_figures(plan, codec),
        "codecs": {name: codec_figures(plan, name) for name in plan.codecs},
        "rules": rules(plan),
    }


def codec_figures(plan: Plan, codec: str) -> dict[str, object]:
    """What depends on the codec."""
    sizes, raw = plan.codecs[codec], plan.codecs[RAW]
    values = asdict(sizes)
    for name in ("codec", "page_tokens", "layers", "total_bytes", "break_even_bytes_per_s"):
        del values[name]
    room = plan.gpu_room_bytes
    return {
        "bytes_per_token": sizes.bytes_per_token,
        "bytes_per_token_layer": sizes.bytes_per_token_layer,
        "bytes_ratio": sizes.page_bytes / raw.page_bytes,
        **values,
        "kv_bytes_total": sizes.total_bytes,
        "sessions_per_group": room // sizes.rank_sequence_bytes,
        "sessions_over_raw": raw.rank_sequence_bytes / sizes.rank_sequence_bytes,
        "break_even_gb_per_s": sizes.break_even_bytes_per_s / 1e9,
        "links_faster_than_recompute": _faster_links(plan, sizes),
    }


def rules(plan: Plan) -> list[str]:
    """How the KV lies over ranks, in sentences."""
    layout, shards = plan.layout, plan.shards
    said: list[str] = []
    if layout.kind is KvKind.MLA:
        said.append(
            f"MLA: the latent of a token is {layout.head_dim} + {layout.rope_dim} values a layer. "
            "Octavo keeps it once"
            + (
                f"; each of the {shards.tp} TP ranks holds a copy in HBM and puts every "
                f"{shards.tp}th page."
                if shards.tp > 1
                else "."
            )
        )
    elif shards.replicas > 1:
        said.append(
            f"TP {shards.tp} is more than {layout.kv_heads} KV heads: {shards.replicas} ranks "
            "hold each head and take turns to put its pages."
        )
    else:
        said.append(
            f"TP {shards.tp}: each rank holds {layout.kv_heads // shards.tp} of "
            f"{layout.kv_heads} KV heads."
        )
    if shards.pp > 1:
        held = [shards.shard(0, stage).held for stage in range(shards.pp)]
        counts = ", ".join(str(part.layer_end - part.layer_begin) for part in held)
        said.append(f"PP {shards.pp}: stages of {counts} layers.")
    if plan.request.model.experts is not None:
        said.append("Experts hold no KV: EP changes none of its sizes.")
    if len(plan.codecs) > 1:
        said.append("The first 16 tokens of a chain stay raw under every codec.")
    if layout.dtype.startswith("float8"):
        said.append("KV that the engine keeps in FP8 already passes through as raw.")
    if plan.gpu_room_bytes == 0:
        said.append("The weights leave no room for KV: more GPUs, or larger ones.")
    return said


def _faster_links(plan: Plan, sizes: CodecSizes) -> list[str]:
    return [name for name, restore_s in sizes.restore_s.items() if restore_s < plan.recompute_s]
