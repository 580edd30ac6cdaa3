"""What else than tokens a request's KV depends on, as extra identity of its page keys."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image, audio or video: ``length`` placeholder tokens from ``offset`` on."""

    identifier: str
    """Its digest, at full width."""
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """All that the keys of a request hang on beside layout, namespace and tokens."""

    salt: str = ""
    adapter: str = ""
    """Name and digest of a LoRA adapter; empty for none."""
    media: Sequence[MediaSpan] = ()

    def extras(self, page_tokens: int) -> dict[int, tuple[bytes, ...]]:
        """Extra identity by position of the page in the chain.

        Salt and adapter belong to the first page, whose key all others build on. A medium
        belongs to every page that has some of it, with its place relative to the page: the same
        image one token later is another prefix.
        """
        by_page: dict[int, list[bytes]] = {}
        if self.adapter:
            by_page.setdefault(0, []).append(b"lora\0" + self.adapter.encode())
        if self.salt:
            by_page.setdefault(0, []).append(b"salt\0" + self.salt.encode())
        for span in sorted(self.media, key=lambda each: (each.offset, each.identifier)):
            last = span.offset + max(span.length, 1) - 1
            for page in range(span.offset // page_tokens, last // page_tokens + 1):
                place = struct.pack("<q", span.offset - page * page_tokens)
                by_page.setdefault(page, []).append(b"media\0" + place + span.identifier.encode())
        return {page: tuple(values) for page, values in by_page.items()}
