"""Which tokens are loaded and which pages are saved: arithmetic, nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.results import Run
from octavo.status import Tier


def loadable_tokens(
    matched_pages: int, page_tokens: int, block_tokens: int, token_count: int, local_tokens: int
) -> int:
    """Tokens to load behind the ``local_tokens`` that the engine has itself, whole blocks only.

    The last token is never among them: the engine has to compute at least one to go on.
    """
    present = min(matched_pages * page_tokens, token_count - 1)
    return max(0, present // block_tokens * block_tokens - local_tokens)


def saveable_pages(computed_tokens: int, known_tokens: int, page_tokens: int) -> int:
    """Full pages at the start of a sequence whose KV may be saved.

    ``computed_tokens`` counts what the running step computes too, speculated tokens included;
    ``known_tokens`` only those that were accepted, so a page with a rejected one never counts.
    """
    return max(0, min(computed_tokens, known_tokens)) // page_tokens


def covering_blocks(first_page: int, page_end: int, pages_per_block: int) -> tuple[int, int]:
    """Half-open range of places in the block table that hold these pages."""
    return first_page // pages_per_block, -(-page_end // pages_per_block)


def pages_by_tier(runs: Iterable[Run], first_page: int, page_end: int) -> dict[Tier, int]:
    """Where the pages of a window lie, by a match's runs."""
    by_tier: dict[Tier, int] = {}
    begin = 0
    for run in runs:
        end = begin + run.page_count
        count = min(end, page_end) - max(begin, first_page)
        if count > 0:
            by_tier[run.tier] = by_tier.get(run.tier, 0) + count
        begin = end
    return by_tier


def turn_of(replica: int, replicas: int, first_page: int, page_end: int) -> tuple[int, int]:
    """The part of a window that one of several ranks with the same KV saves."""
    count = page_end - first_page
    return (
        first_page + count * replica // replicas,
        first_page + count * (replica + 1) // replicas,
    )
