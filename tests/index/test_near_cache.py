"""What is remembered of matches, and what is not asked again at once."""

from __future__ import annotations

from octavo_server.index.backoff import Backoff
from octavo_server.index.near_cache import NearCache


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_values_are_known_for_a_moment_and_absence_never() -> None:
    clock = Clock()
    near = NearCache(age_s=1.0, now=clock)
    near.put([b"a", b"b"], [b"1", b""])
    assert near.find([b"a", b"b", b"c"]) == [b"1", None, None]
    clock.now_s += 0.9
    near.put([b"c"], [b"3"])
    assert near.find([b"a", b"c"]) == [b"1", b"3"]
    clock.now_s += 0.2
    assert near.find([b"a", b"c"]) == [None, b"3"]
    near.put([b"c"], [b""])  # it is gone
    assert near.find([b"c"]) == [None]


def test_size_is_bounded_and_the_oldest_go_first() -> None:
    near = NearCache(entries_max=3, now=Clock())
    for name in (b"a", b"b", b"c", b"a", b"d"):
        near.put([name], [name])
    assert len(near) == 3
    assert near.find([b"a", b"b", b"c", b"d"]) == [b"a", None, b"c", b"d"]
    near.forget([b"a", b"unknown"])
    assert near.find([b"a", b"d"]) == [None, b"d"]
    near.clear()
    assert len(near) == 0


def test_expired_values_do_not_take_room() -> None:
    clock = Clock()
    near = NearCache(age_s=1.0, now=clock)
    near.put([b"%d" % number for number in range(100)], [b"x"] * 100)
    clock.now_s += 2
    near.put([b"new"], [b"x"])
    assert len(near) == 1


def test_one_caller_asks_after_a_failure_and_all_after_a_success() -> None:
    clock = Clock()
    backoff = Backoff(first_s=1.0, last_s=4.0, now=clock)
    assert backoff.may_ask()
    assert backoff.may_ask()
    backoff.failed()
    assert not backoff.may_ask()
    assert 0.5 <= backoff.remaining_s <= 1.0
    clock.now_s += 1.1
    assert backoff.may_ask()
    assert not backoff.may_ask()  # the first one asks for all
    pauses: list[float] = []
    for _ in range(4):
        backoff.failed()
        pauses.append(backoff.remaining_s)
    assert 2.0 <= pauses[-1] <= 4.0
    backoff.succeeded()
    assert backoff.remaining_s == 0
    assert backoff.may_ask()
    assert backoff.may_ask()
