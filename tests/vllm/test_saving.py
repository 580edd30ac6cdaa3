"""Puts stay behind the step that computed their pages, unless their room is wanted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

from octavo.vllm.orders import PageOrder
from octavo.vllm.saving import BEHIND_S, Saver, SaveTarget, behind_s
from octavo.vllm.settings import Role

PAGE_BYTES = 1 << 10
LONG_S = 60.0


class Room:
    """Blocks of one page each, with room for so many copies."""

    pages_per_block = 1
    page_bytes = PAGE_BYTES
    units = (0,)

    def __init__(self, room_pages: int) -> None:
        self.room_pages = room_pages

    def snapshot(self, block_ids: Sequence[int], first_page: int, page_end: int) -> Any:
        if page_end - first_page > self.room_pages:
            return None
        self.room_pages -= page_end - first_page

        def release() -> None:
            self.room_pages += page_end - first_page

        return SimpleNamespace(source=None, release=release)

    def transfers(self) -> AbstractContextManager[None]:
        return nullcontext()


class Puts:
    """A client that notes when its puts begin."""

    def __init__(self) -> None:
        self.begun_s: list[float] = []

    def put(self, *_: object, **__: object) -> Any:
        self.begun_s.append(time.monotonic())
        raise RuntimeError("not stored: no matter here")


def saver_of(behind_s: float) -> tuple[Saver, list[str]]:
    counted: list[str] = []
    return Saver(8 * PAGE_BYTES, lambda name, count: counted.extend([name] * count), behind_s), (
        counted
    )


def take(saver: Saver, room: Room, puts: Puts, page: int) -> None:
    target = SaveTarget(cast("Any", puts), cast("Any", room))
    saver.take(target, cast("Any", None), PageOrder("request", page, page + 1, (page,), page))


def test_a_put_begins_when_the_first_token_had_time_to_go_out() -> None:
    saver, counted = saver_of(BEHIND_S)
    puts, taken_s = Puts(), time.monotonic()
    take(saver, Room(8), puts, 0)
    assert saver.drain(LONG_S)
    assert puts.begun_s[0] >= taken_s + BEHIND_S
    assert counted == ["save_failed_pages"]
    saver.close()


def test_only_a_producer_s_puts_do_not_wait() -> None:
    assert [behind_s(role) for role in (Role.PRODUCER, Role.BOTH)] == [0.0, BEHIND_S]


def test_a_put_does_not_stay_behind_while_other_pages_wait_for_its_room() -> None:
    saver, _ = saver_of(LONG_S)
    puts, room = Puts(), Room(1)
    take(saver, room, puts, 0)
    assert not saver.drain(0.05)
    assert not puts.begun_s
    take(saver, room, puts, 1)
    assert saver.drain(LONG_S / 2)
    assert len(puts.begun_s) == 1
    saver.close()


def test_a_put_does_not_stay_behind_when_the_engine_ends() -> None:
    saver, _ = saver_of(LONG_S)
    puts = Puts()
    take(saver, Room(8), puts, 0)
    assert not saver.drain(0.05)
    saver.close()
    assert saver.drain(LONG_S / 2)
    assert len(puts.begun_s) == 1
