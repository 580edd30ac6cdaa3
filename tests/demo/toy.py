"""A tokenizer and a model small enough for tests: bytes as tokens, random weights."""

from __future__ import annotations

import importlib
from typing import Any

from tests.transformers.tiny import make_model

from octavo.demo.inference import Checkpoint

hf: Any = importlib.import_module("transformers")
tokenizers: Any = importlib.import_module("tokenizers")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Any:
    """A token a byte, and two special ones."""
    specials = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(specials + alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_checkpoint() -> Checkpoint:
    """A model over the toy tokenizer's 258 tokens."""
    return Checkpoint(make_model(vocabulary=258, positions=8192), make_tokenizer())
