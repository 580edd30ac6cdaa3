"""Codecs pack the KV of a unit into bytes, on the worker's device. The node sees opaque bytes.

Importing this package does not import torch; packing does.
"""

from octavo.codec.base import Codec
from octavo.codec.raw import RawCodec
from octavo.codec.registry import UnknownVariant, codec_of, variants

__all__ = ["Codec", "RawCodec", "UnknownVariant", "codec_of", "variants"]
