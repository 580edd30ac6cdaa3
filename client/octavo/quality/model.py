"""The model under test: its tokens, its KV as one tensor, and its logits over any such KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from octavo.quality.errors import QualityError
from octavo.quality.texts import Text
from octavo.transformers import UnsupportedModel, following_logits, kv_layout
from octavo_proto.layout import Layout, LayoutError

SERVING_DTYPE: Final = "bfloat16"
"""What an engine would hold this KV in; bytes are counted against it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in float32 with its tokenizer. Their classes differ by family, hence ``Any``."""

    model: Any
    tokenizer: Any
    layout: Layout
    """Of the float32 KV that is packed here."""

    @property
    def serving_layout(self) -> Layout:
        """Of the same KV in an engine."""
        return replace(self.layout, dtype=SERVING_DTYPE)

    def tokens(self, text: Text, count: int) -> Tensor:
        """The first ``count`` token ids of a text.

        Raises:
            QualityError: it is too short.
        """
        found: list[int] = self.tokenizer(text.content)["input_ids"]
        if len(found) < count:
            raise QualityError(f"text {text.name} has {len(found)} tokens, {count} are needed")
        return torch.tensor(found[:count])

    def prefill(self, tokens: Tensor) -> Tensor:
        """KV of some tokens, ``[layer, 2, token, head, head_dim]``, K before V.

        Raises:
            QualityError: the model's cache has another shape than its configuration says.
        """
        cache = self._empty_cache()
        following_logits(self.model, tokens, cache, logits_to_keep=1)
        shape = (1, self.layout.kv_heads, len(tokens), self.layout.head_dim)
        pairs: list[Tensor] = []
        for index, layer in enumerate(cache.layers):
            if layer.keys.shape != shape or layer.values.shape != shape:
                raise QualityError(
                    f"layer {index} has keys {tuple(layer.keys.shape)} and values "
                    f"{tuple(layer.values.shape)}, both must be {shape}"
                )
            pairs.append(torch.stack((layer.keys[0], layer.values[0])))
        return torch.stack(pairs).transpose(2, 3).contiguous()

    def logits(self, kv: Tensor, tokens: Tensor) -> Tensor:
        """Logits after each of ``tokens``, which follow what ``kv`` holds."""
        cache = self._empty_cache()
        heads_first = kv.transpose(2, 3)
        for index in range(self.layout.layers):
            cache.update(heads_first[index, 0][None], heads_first[index, 1][None], index)
        return following_logits(self.model, tokens, cache)

    def _empty_cache(self) -> Any:
        hf: Any = transformers
        return hf.DynamicCache(config=self.model.config)


def open_subject(folder: Path, *, page_tokens: int, token_count: int) -> Subject:
    """Loads a checkpoint in float32 for texts of ``token_count`` tokens.

    Raises:
        QualityError: there is none, its KV cannot be paged, or the texts are too long for it.
    """
    hf: Any = transformers
    try:
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        tokenizer = hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise QualityError(f"no causal model in {folder}: {first_line}") from None
    try:
        layout = kv_layout(
            model, "quality", model_id=folder.name, weights_revision="", page_tokens=page_tokens
        )
    except (UnsupportedModel, LayoutError) as error:
        raise QualityError(str(error)) from None
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and token_count > positions:
        raise QualityError(
            f"prefix and score are {token_count} tokens, the model takes {positions}"
        )
    return Subject(model, tokenizer, layout)
