"""Codecs pack the KV of a unit into bytes, on the worker's device. The node sees opaque bytes.

Importing this package does not import torch; packing does.
"""

from octavo.codec.base import Codec
from octavo.codec.packed import PackedCodec
from octavo.codec.profile import PROFILES, NamespaceProfiles, Profile
from octavo.codec.raw import RawCodec
from octavo.codec.registry import (
    SINK_TOKENS,
    UnknownCodec,
    UnknownVariant,
    codec_by_name,
    codec_names,
    codec_of,
    variants,
)

__all__ = [
    "PROFILES",
    "SINK_TOKENS",
    "Codec",
    "NamespaceProfiles",
    "PackedCodec",
    "Profile",
    "RawCodec",
    "UnknownCodec",
    "UnknownVariant",
    "codec_by_name",
    "codec_names",
    "codec_of",
    "variants",
]
