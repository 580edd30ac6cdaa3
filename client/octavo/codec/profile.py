"""Profiles: how the pages of a chain are packed, by what they are for.

A profile is a choice of the writer's. Readers take every variant, so another profile does not
empty the cache: pages of both lie side by side until they are evicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

from octavo.codec.base import Codec
from octavo.codec.packed import PACKED_DTYPES
from octavo.codec.registry import RAW, UnknownCodec, codec_by_name, codec_names, first_page_codec
from octavo_proto.layout import KvKind, Layout

PROFILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "general": "fp8_e5m2",
        "code": "fp8_e4m3",
        "math": "fp8_e4m3",
        "exact": "raw",
        "best": "int8",
        "dense": "int5",
    }
)
"""Codec by profile."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Maps a page's position in its chain to the codec that packs it."""

    name: str
    codec_name: str

    @classmethod
    def named(cls, name: str) -> Self:
        """A profile of ``PROFILES``, or the one of a codec's name.

        Raises:
            UnknownCodec: neither is called that.
        """
        codec_name = PROFILES.get(name, name)
        if codec_name not in codec_names():
            raise UnknownCodec(
                f"{name!r} is neither a profile ({', '.join(PROFILES)}) nor a codec "
                f"({', '.join(codec_names())})"
            )
        return cls(name, codec_name)

    def codec_at(self, layout: Layout, position: int) -> Codec:
        """The codec of the page at ``position``: the first 16 tokens of a chain are raw, and so
        is everything of an engine whose cache is quantised already."""
        if layout.kind is KvKind.FOREIGN or layout.dtype not in PACKED_DTYPES:
            return RAW
        if position == 0:
            return first_page_codec(self.codec_name, layout.page_tokens)
        return codec_by_name(self.codec_name)

    def page_bytes(self, layout: Layout, position: int) -> int:
        """Bytes of the whole page at ``position``, all its units."""
        codec = self.codec_at(layout, position)
        return sum(codec.unit_bytes(layout, unit) for unit in range(layout.unit_count))


@dataclass(frozen=True, slots=True)
class NamespaceProfiles:
    """Which profile a namespace has; a setting of the writer's side."""

    default: Profile
    by_namespace: Mapping[str, Profile]

    @classmethod
    def parsed(cls, default: str = "exact", by_namespace: Mapping[str, str] | None = None) -> Self:
        """From names.

        Raises:
            UnknownCodec: names the one that is none.
        """
        named = {space: Profile.named(name) for space, name in (by_namespace or {}).items()}
        return cls(Profile.named(default), MappingProxyType(named))

    def of(self, namespace: str) -> Profile:
        """The namespace's own, or the default."""
        return self.by_namespace.get(namespace, self.default)
