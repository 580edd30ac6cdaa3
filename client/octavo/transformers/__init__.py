"""KV of Hugging Face ``transformers`` models as Octavo pages: the layout, and both directions."""

from octavo.transformers.forward import following_logits, next_logits
from octavo.transformers.layout import UnsupportedModel, checkpoint_revision, kv_layout
from octavo.transformers.pages import CacheSink, CacheSource

__all__ = [
    "CacheSink",
    "CacheSource",
    "UnsupportedModel",
    "checkpoint_revision",
    "following_logits",
    "kv_layout",
    "next_logits",
]
