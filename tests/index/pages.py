"""Page keys and holders for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from octavo_server.index.changes import Changes
from octavo_server.index.entries import ALL_UNITS, Keys
from octavo_server.index.found import Found
from octavo_server.index.holders import Holder, LeaseTerms
from octavo_server.index.prefix_index import Applied, Numbers, PrefixIndex, ShardOutcome

T = TypeVar("T")

TERMS = LeaseTerms(lease_s=60, keep_s=120)


def run(work: Coroutine[Any, Any, T]) -> T:
    """One test's event loop; no test waits for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Waits until ``condition`` comes true."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - what it waits for is in another process
            await asyncio.sleep(0.02)


def chain(seed: int, page_count: int) -> Keys:
    """Page keys as hashing makes them."""
    return np.random.default_rng(seed).integers(0, 2**64, (page_count, 2), dtype=np.uint64)


def holder(
    node: str, store: str = "memory", incarnation: str = "boot-1", *, started_ms: int = 1
) -> Holder:
    return Holder(
        node_id=node,
        store=store,
        incarnation=incarnation,
        address=f"{node}:9471",
        started_ms=started_ms,
    )


async def join(index: PrefixIndex, node: str) -> int:
    """A node's memory registers; its id."""
    holder_id = await index.registry.register(holder(node), TERMS)
    assert holder_id is not None
    return holder_id


async def publish(
    index: PrefixIndex,
    holder_id: int,
    keys: Keys,
    units: int = ALL_UNITS,
    numbers: Numbers | None = None,
) -> Applied:
    """All of it, in batches; nothing may go wrong."""
    numbers = numbers or await numbers_from(index, holder_id)
    columns = np.full(len(keys), units, dtype=np.uint64)
    total = Applied()
    for batch in Changes.published(keys, columns).batches():
        applied = await index.apply(holder_id, batch, numbers)
        assert not applied.failed
        assert set(applied.outcomes.values()) <= {ShardOutcome.APPLIED}
        total.crowded_pages += applied.crowded_pages
    return total


async def withdraw(index: PrefixIndex, holder_id: int, keys: Keys) -> None:
    await publish(index, holder_id, keys, units=0)


async def numbers_from(index: PrefixIndex, holder_id: int) -> Numbers:
    """Numbers that go on where the index is."""
    numbers = Numbers()
    for shard, number in enumerate((await index.numbers_of(holder_id)).tolist()):
        numbers.confirm(shard, number)
    return numbers


def named(found: Found) -> list[set[str]]:
    """The nodes named for each page of the prefix."""
    pages: list[set[str]] = []
    for run_ in found.runs:
        nodes = {found.holders[each.holder_id].node_id for each in run_.holdings}
        pages += [nodes] * (run_.end - run_.begin)
    return pages
