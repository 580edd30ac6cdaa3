"""The worker's side of Octavo: load what the node has, put what was computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.client import Client
from octavo.demo.messages import RAW_CODEC
from octavo.status import Tier
from octavo.transformers import CacheSink, CacheSource
from octavo.transformers.pages import KvCache
from octavo_proto.layout import Layout


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came from the node."""

    token_count: int = 0
    size_bytes: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict[str, int])
    statuses: dict[str, int] = field(default_factory=dict[str, int])


class PageMemory:
    """One conversation's pages at a node. Only whole pages travel."""

    def __init__(
        self,
        client: Client,
        layout: Layout,
        *,
        namespace: str | None = None,
        profile: str = RAW_CODEC,
    ) -> None:
        """``profile`` packs what is saved; whatever packed it, all can be loaded."""
        self._client = client
        self._layout = layout
        self._profile = profile
        self._chain = client.chain(layout=layout.name, namespace=namespace)
        self._saved_pages = 0

    def load(self, prompt: Sequence[int], cache: KvCache) -> Loaded:
        """Fills an empty cache with the longest prefix of ``prompt`` that the node has.

        The last token is always left to compute, since its logits choose the first new one.
        """
        self._follow(prompt)
        match = self._client.match(self._chain)
        page_count = min(match.page_count, (len(prompt) - 1) // self._layout.page_tokens)
        if not page_count:
            return Loaded()
        sink = CacheSink(self._layout, page_count=page_count)
        result = self._client.get(self._chain, sink, page_count=page_count)
        sink.extend(cache, result.page_count)
        self._saved_pages = result.page_count
        by_tier: Counter[str] = Counter()
        left = result.page_count
        for run in match.runs:
            pages = min(run.page_count, left)
            by_tier[Tier(run.tier).name.lower()] += pages * self._layout.page_tokens
            left -= pages
        return Loaded(
            token_count=result.page_count * self._layout.page_tokens,
            size_bytes=result.bytes_copied,
            tokens_by_tier={tier: tokens for tier, tokens in by_tier.items() if tokens},
            statuses={status.name: count for status, count in result.counts.items()},
        )

    def save(self, held: Sequence[int], cache: KvCache) -> dict[str, int]:
        """Puts the full pages of tokens whose KV ``cache`` holds. How many units by status."""
        self._follow(held)
        page_count = len(held) // self._layout.page_tokens
        new_pages = page_count - self._saved_pages
        if new_pages < 1:
            return {}
        first_page = self._saved_pages
        source = CacheSource(
            cache,
            self._layout,
            first_page=first_page,
            page_count=new_pages,
            profile=self._profile,
        )
        result = self._client.put(self._chain, source, first_page=first_page, page_count=new_pages)
        self._saved_pages = page_count
        return {status.name: count for status, count in result.counts.items()}

    def _follow(self, tokens: Sequence[int]) -> None:
        self._chain.extend(tokens[self._chain.token_count :])
