"""What packing KV does to a real model's next tokens. Needs torch and transformers.

A prefix is run through the model, its KV packed and unpacked, and the tokens that follow are
scored over what came back, beside the KV that was never packed.
"""

from octavo.quality.errors import QualityError
from octavo.quality.measuring import Measured, measure
from octavo.quality.scoring import Score
from octavo.quality.texts import Text, choose_texts, committed_texts

__all__ = [
    "Measured",
    "QualityError",
    "Score",
    "Text",
    "choose_texts",
    "committed_texts",
    "measure",
]
