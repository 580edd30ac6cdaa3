"""Names and numbers of namespaces and layouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cache.world import ONE, World

from octavo_server.errors import LimitReached, SessionRefusedError


@pytest.mark.parametrize("with_nvme", [False, True])
def test_a_name_stands_for_one_layout(tmp_path: Path, with_nvme: bool) -> None:
    async def run() -> None:
        async with World(tmp_path / "nvme" if with_nvme else None) as world:
            registry = world.cache.registry
            a, b = [await registry.namespace(name) for name in ("a", "b")]
            assert a != b
            known = await registry.layout(a, ONE)
            assert await registry.layout(a, ONE) is known
            other = replace(ONE, rope="base=10000")
            with pytest.raises(SessionRefusedError, match=r"'one'.*rope is 'base=10000'.*rope ''"):
                await registry.layout(a, other)
            assert (await registry.layout(b, other)).number != known.number
            if not with_nvme:
                return
            await world.reopen(killed=True)
            registry = world.cache.registry
            assert (await registry.namespace("a"), await registry.namespace("b")) == (a, b)
            assert (await registry.layout(a, ONE)).number == known.number
            with pytest.raises(SessionRefusedError):
                await registry.layout(a, other)

    asyncio.run(run())


def test_of_two_sessions_that_bring_two_layouts_of_one_name_one_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with World(tmp_path / "nvme") as world:
            registry = world.cache.registry
            numbers = await asyncio.gather(*(registry.namespace("n") for _ in range(5)))
            assert len(set(numbers)) == 1
            assert registry.namespace_count == 1
            answers = await asyncio.gather(
                *(registry.layout(numbers[0], replace(ONE, rope=str(e))) for e in range(3)),
                return_exceptions=True,
            )
            refused = [isinstance(answer, SessionRefusedError) for answer in answers]
            assert refused == [False, True, True]

    asyncio.run(run())


@pytest.mark.parametrize("with_nvme", [False, True])
def test_new_weights_keep_the_name_and_get_pages_of_their_own(
    tmp_path: Path, with_nvme: bool
) -> None:
    async def run() -> None:
        async with World(tmp_path / "nvme" if with_nvme else None) as world:
            registry = world.cache.registry
            namespace = await registry.namespace("n")
            epochs = [replace(ONE, weights_epoch=epoch) for epoch in range(3)]
            known = [await registry.layout(namespace, layout) for layout in epochs]
            assert len({layout.number for layout in known}) == 3
            assert len({layout.fingerprint for layout in known}) == 3
            assert await registry.layout(namespace, epochs[0]) is known[0]
            with pytest.raises(SessionRefusedError, match="dtype"):
                await registry.layout(namespace, replace(ONE, weights_epoch=9, dtype="float16"))

    asyncio.run(run())


def test_a_node_knows_only_so_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_server.cache.registry.NAMESPACES_MAX", 2)
    monkeypatch.setattr("octavo_server.cache.registry.LAYOUTS_MAX", 2)

    async def run() -> None:
        async with World(None) as world:
            registry = world.cache.registry
            namespace = await registry.namespace("a")
            await registry.namespace("b")
            with pytest.raises(LimitReached, match="2 namespaces, the limit"):
                await registry.namespace("c")
            assert await registry.namespace("a") == namespace
            for name in ("x", "y"):
                await registry.layout(namespace, replace(ONE, name=name))
            with pytest.raises(LimitReached, match="2 layouts, the limit"):
                await registry.layout(namespace, replace(ONE, name="z"))

    asyncio.run(run())
