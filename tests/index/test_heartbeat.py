"""Leases are kept whatever the node's own threads do."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from tests.index.pages import holder, run

from octavo_server.index.errors import IndexUnavailable, Trouble
from octavo_server.index.heartbeat import Heartbeat, RegistryFactory
from octavo_server.index.holders import Holder, HolderRegistry, HolderView, LeaseTerms, Renewal
from octavo_server.index.local_registry import LocalRegistry

TERMS = LeaseTerms(lease_s=0.6, keep_s=0.6)


class Told:
    """What a heartbeat told its node."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self.superseded: list[str] = []

    def on_id(self, who: Holder, holder_id: int) -> None:
        self.ids.setdefault(who.store, []).append(holder_id)

    def on_superseded(self, who: Holder) -> None:
        self.superseded.append(who.store)


class AwayRegistry(LocalRegistry):
    """Cannot be reached while ``is_away``."""

    is_away = False

    async def renew(self, holder_id: int, holder: Holder, terms: LeaseTerms) -> Renewal:
        self._refuse()
        return await super().renew(holder_id, holder, terms)

    async def register(self, holder: Holder, terms: LeaseTerms) -> int | None:
        self._refuse()
        return await super().register(holder, terms)

    def _refuse(self) -> None:
        if self.is_away:
            raise IndexUnavailable(Trouble.TIMEOUT)


def opener(registry: HolderRegistry) -> RegistryFactory:
    @asynccontextmanager
    async def open_registry() -> AsyncGenerator[HolderRegistry]:
        yield registry

    return open_registry


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def view(registry: HolderRegistry) -> HolderView:
    async def look() -> HolderView:
        return await registry.view()

    return run(look())


def test_leases_run_while_the_event_loop_of_the_node_hangs() -> None:
    registry, told = LocalRegistry(), Told()
    leases = [(holder("a"), TERMS), (holder("a", "nvme-1"), TERMS)]
    heartbeat = Heartbeat(opener(registry), leases, told.on_id, told.on_superseded)
    heartbeat.start()
    wait_for(lambda: len(told.ids) == 2)

    async def hang() -> None:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            pass  # holds this loop, and the GIL as much as it may

    run(hang())
    now = view(registry)
    assert all(now.is_live(each, time.monotonic()) for each in now.holders)
    assert {each for ids in told.ids.values() for each in ids} == set(now.holders)
    heartbeat.stop(leave=True)
    assert not view(registry).holders


def test_without_leaving_the_lease_runs_out() -> None:
    registry, told = LocalRegistry(), Told()
    heartbeat = Heartbeat(opener(registry), [(holder("a"), TERMS)], told.on_id, told.on_superseded)
    heartbeat.start()
    wait_for(lambda: "memory" in told.ids)
    heartbeat.stop(leave=False)
    (holder_id,) = told.ids["memory"]
    now = view(registry)
    assert now.knows(holder_id)
    assert now.is_live(holder_id, now.taken_s)
    assert not now.is_live(holder_id, now.taken_s + TERMS.lease_s)


def test_forgotten_holder_gets_a_new_id_and_says_so() -> None:
    registry, told = LocalRegistry(), Told()
    heartbeat = Heartbeat(opener(registry), [(holder("a"), TERMS)], told.on_id, told.on_superseded)
    heartbeat.start()
    wait_for(lambda: "memory" in told.ids)
    run(registry.retire(told.ids["memory"][0]))
    wait_for(lambda: len(told.ids["memory"]) == 2)
    assert told.ids["memory"][0] != told.ids["memory"][1]
    heartbeat.stop(leave=True)


def test_superseded_holder_stays_away_and_the_others_go_on() -> None:
    registry, told = LocalRegistry(), Told()
    leases = [(holder("a"), TERMS), (holder("a", "nvme-1"), TERMS)]
    heartbeat = Heartbeat(opener(registry), leases, told.on_id, told.on_superseded)
    heartbeat.start()
    wait_for(lambda: len(told.ids) == 2)
    later = holder("a", incarnation="boot-2", started_ms=2)
    run(registry.register(later, LeaseTerms(lease_s=60, keep_s=60)))
    wait_for(lambda: told.superseded == ["memory"])
    beats = heartbeat.beats
    wait_for(lambda: heartbeat.beats > beats + 2)
    assert told.superseded == ["memory"]
    assert len(told.ids["memory"]) == 1
    heartbeat.stop(leave=True)
    assert list(view(registry).holders.values()) == [later]


def test_registry_that_is_away_is_asked_again_until_it_is_back() -> None:
    registry, told = AwayRegistry(), Told()
    registry.is_away = True
    heartbeat = Heartbeat(opener(registry), [(holder("a"), TERMS)], told.on_id, told.on_superseded)
    heartbeat.start()
    wait_for(lambda: heartbeat.failed_beats >= 2)
    assert not told.ids
    registry.is_away = False
    wait_for(lambda: "memory" in told.ids)
    registry.is_away = True
    wait_for(lambda: heartbeat.failed_beats >= 4)
    registry.is_away = False
    failed = heartbeat.failed_beats
    wait_for(lambda: heartbeat.beats > failed + 3)
    assert len(told.ids["memory"]) == 1
    heartbeat.stop(leave=True)
