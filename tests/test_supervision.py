"""Background tasks whose death somebody notices."""

from __future__ import annotations

import asyncio

import pytest

from octavo_server.supervision import Supervisor


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("no more eviction")


async def ends() -> None:
    await asyncio.sleep(0)


async def lives() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["fails", "ends", "is cancelled"])
def test_the_death_of_a_task_is_a_problem(how: str) -> None:
    deaths: list[int] = []

    async def run() -> None:
        supervisor = Supervisor(lambda: deaths.append(1))
        supervisor.start("healthy", lives())
        supervisor.start("writer", fails() if how == "fails" else ends())
        if how == "is cancelled":
            [task.cancel() for task in asyncio.all_tasks() if task.get_name() == "writer"]
        assert supervisor.problems() == ()
        await asyncio.sleep(0.01)
        (problem,) = supervisor.problems()
        assert problem.startswith("background task writer died: ")
        assert ("no more eviction" in problem) == (how == "fails")
        assert deaths == [1]
        await supervisor.stop()

    asyncio.run(run())


def test_stopping_is_no_death() -> None:
    deaths: list[int] = []

    async def run() -> None:
        supervisor = Supervisor(lambda: deaths.append(1))
        supervisor.start("one", lives())
        supervisor.start("two", lives())
        await asyncio.sleep(0)
        await supervisor.stop()
        await asyncio.sleep(0)
        assert supervisor.problems() == ()
        assert not [task for task in asyncio.all_tasks() if task.get_name() in ("one", "two")]

    asyncio.run(run())
    assert deaths == []
