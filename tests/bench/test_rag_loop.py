"""Who asks next."""

from __future__ import annotations

from octavo.bench.rag.loop import ClosedLoop


def taken(loop: ClosedLoop, now_s: float) -> list[int]:
    found: list[int] = []
    while (session := loop.take(now_s)) is not None:
        found.append(session)
    return found


def test_sessions_take_turns_and_no_more_run_than_may() -> None:
    loop = ClosedLoop(sessions=4, turns=2, in_flight=2)
    assert taken(loop, 0.0) == [0, 1]
    loop.answered(1, 1.0)
    assert taken(loop, 1.0) == [2]
    loop.answered(0, 2.0)
    assert taken(loop, 2.0) == [3]
    loop.answered(2, 3.0)
    loop.answered(3, 3.0)
    # In the order of their answers: each has waited for all others.
    assert taken(loop, 3.0) == [1, 0]
    loop.answered(1, 4.0)
    loop.answered(0, 4.0)
    assert taken(loop, 4.0) == [2, 3]
    assert loop.is_done


def test_session_that_thinks_is_due_after_its_time() -> None:
    loop = ClosedLoop(sessions=1, turns=2, in_flight=1, think_s=5.0)
    assert taken(loop, 0.0) == [0]
    assert loop.wait_s(0.5) is None
    loop.answered(0, 1.0)
    assert taken(loop, 5.9) == []
    assert loop.wait_s(4.0) == 2.0
    assert taken(loop, 6.0) == [0]
    assert loop.is_done


def test_thinking_session_lets_others_go_first() -> None:
    loop = ClosedLoop(sessions=2, turns=2, in_flight=1, think_s=5.0)
    assert taken(loop, 0.0) == [0]
    loop.answered(0, 1.0)
    assert taken(loop, 1.0) == [1]
    loop.answered(1, 2.0)
    assert taken(loop, 6.5) == [0]


def test_nobody_is_waited_for_while_all_may_ask_and_none_is_due() -> None:
    loop = ClosedLoop(sessions=2, turns=1, in_flight=1)
    assert loop.wait_s(0.0) == 0.0
    assert taken(loop, 0.0) == [0]
    assert loop.wait_s(0.0) is None
    assert not loop.is_done
    loop.answered(0, 1.0)
    assert taken(loop, 1.0) == [1]
    assert loop.is_done
