"""What sizing must know of a model: the shape of its KV, its weights, its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_proto.layout import KvKind, Layout
from octavo_proto.limits import PAGE_TOKENS_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA beyond what is cached: the sizes of its projections."""

    query_rank: int
    """0: queries are projected directly."""
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The expert layers of a mixture. They hold no KV; they weigh, and some of them compute."""

    count: int
    active: int
    width: int
    shared_width: int = 0
    """Width of what every token passes as well, all shared experts together."""
    layers: int
    """Layers with experts; the others have a dense MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder in which every layer attends to everything.

    For MLA, ``head_dim`` is the latent's rank, ``rope_dim`` the rotary key's, ``kv_heads`` 1.
    Weights are counted without norms and biases (under 0.1 %) and with gated MLPs.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int
    rope_dim: int = 0
    shares_embedding: bool = False
    """The output projection is the embedding."""
    latent: LatentAttention | None = None
    experts: Experts | None = None
    kv_dtype: str = "bfloat16"
    weight_bits: int = 16
    weight_bytes_on_disk: int | None = None
    """Of the checkpoint itself, where it was there to be looked at."""

    @property
    def kind(self) -> KvKind:
        return KvKind.GQA if self.latent is None else KvKind.MLA

    def layout(self, page_tokens: int, dtype: str) -> Layout:
        """The layout of this model's KV, in one unit. Raises LayoutError: a size is refused."""
        return Layout(
            name=self.name,
            model=self.name,
            kind=self.kind,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope_dim=self.rope_dim,
            dtype=dtype,
            page_tokens=page_tokens,
        )

    @property
    def raw_token_bytes(self) -> int:
        """KV of a token as the model has it, all layers together."""
        layout = self.layout(PAGE_TOKENS_STEP, self.kv_dtype)
        return layout.raw_page_bytes // PAGE_TOKENS_STEP

    @property
    def parameters(self) -> int:
        """All of them."""
        embeddings = self.vocabulary * self.hidden * (1 if self.shares_embedding else 2)
        return embeddings + self._body_parameters(all_experts=True)

    @property
    def prefill_parameters(self) -> int:
        """Those that a token of a prompt is multiplied with. The output projection is not
        among them: a prefill needs it for the last token only."""
        return self._body_parameters(all_experts=False)

    @property
    def expert_parameters(self) -> int:
        """Those of routed experts, which expert parallelism spreads."""
        if self.experts is None:
            return 0
        return self.experts.layers * 3 * self.hidden * self.experts.count * self.experts.width

    def weight_bytes(self, bits: int | None = None) -> int:
        """Bytes of the weights at ``bits`` a parameter, or as the checkpoint has them."""
        if bits is None and self.weight_bytes_on_disk is not None:
            return self.weight_bytes_on_disk
        return self.parameters * (bits or self.weight_bits) // 8

    def prefill_flops(self, token_count: int) -> int:
        """Operations to compute the KV of a prompt: two per weight and token, and two per
        element of each causal query-key and weight-value product."""
        if self.latent is None:
            pair_dims = 2 * self.head_dim
        else:
            pair_dims = self.latent.nope_dim + self.rope_dim + self.latent.value_dim
        attention = self.layers * self.heads * pair_dims * token_count**2
        return 2 * self.prefill_parameters * token_count + attention

    def _body_parameters(self, *, all_experts: bool) -> int:
        mlp = 3 * self.hidden * self.mlp_width
        total = self.layers * self._attention_parameters()
        if self.experts is None:
            return total + self.layers * mlp
        experts = self.experts
        used = experts.count if all_experts else experts.active
        router = self.hidden * experts.count
        per_layer = 3 * self.hidden * (used * experts.width + experts.shared_width) + router
        return total + experts.layers * per_layer + (self.layers - experts.layers) * mlp

    def _attention_parameters(self) -> int:
        if self.latent is None:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        latent = self.latent
        query_width = self.heads * (latent.nope_dim + self.rope_dim)
        if latent.query_rank:
            query = latent.query_rank * (self.hidden + query_width)
        else:
            query = self.hidden * query_width
        down = self.hidden * (self.head_dim + self.rope_dim)
        up = self.head_dim * self.heads * (latent.nope_dim + latent.value_dim)
        return query + down + up + self.heads * latent.value_dim * self.hidden
