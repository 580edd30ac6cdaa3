"""Things that run out, on a clock of ours."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.clock import Clock

from octavo_server.cache.deadlines import Deadline, Deadlines


def test_a_deadline_runs_out_once_and_not_before_its_time() -> None:
    clock, expired = Clock(), list[str]()
    deadlines = Deadlines(clock)
    deadlines.after(1.0, lambda: expired.append("one"))
    deadlines.after(2.0, lambda: expired.append("two")).cancel()
    deadlines.run_due()
    assert expired == []
    clock.now_s += 1.0
    deadlines.run_due()
    clock.now_s += 5.0
    deadlines.run_due()
    assert expired == ["one"]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(["move", "cancel", "wait"]), st.integers(0, 9)
        ),
        max_size=30,
    )
)
@settings(max_examples=200, derandomize=True)
def test_moving_and_cancelling_agree_with_a_dict(plan: list[tuple[int, str, int]]) -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    expired: list[int] = []
    due: dict[int, float] = {}

    def made(number: int) -> Deadline:
        due[number] = clock.now_s + 3.0
        return deadlines.after(3.0, lambda: expired.append(number))

    handles = [made(number) for number in range(4)]
    gone: set[int] = set()
    for which, what, amount in plan:
        if what == "move" and which not in gone:
            due[which] = clock.now_s + amount
            handles[which].move(due[which])
        elif what == "cancel" and which not in gone:
            handles[which].cancel()
            due.pop(which, None)
            gone.add(which)
        elif what == "wait":
            clock.now_s += amount
            deadlines.run_due()
            over = {number for number, at in due.items() if at <= clock.now_s}
            assert over <= set(expired)
            for number in over:
                gone.add(number)
                del due[number]
            assert len(expired) == len(set(expired))
            assert not set(expired) & set(due)
