"""Turns reach the engine with its own answers in them, and no more at a time than may."""

from __future__ import annotations

import time

from octavo.bench.rag.converse import converse
from octavo.bench.rag.loop import ClosedLoop
from octavo.bench.rag.rates import rates
from octavo.bench.rag.workload import Lengths, make_workload
from octavo.bench.vllm_jobs import Answer, Request

LENGTHS = Lengths(system_tokens=10, document_tokens=20, user_tokens=6, answer_tokens=5)
BLOCK = 4


class PerfectEngine:
    """Reuses whatever it has seen, takes no time, and answers with tokens nobody else has."""

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.most_running = 0
        self._seen: set[tuple[int, ...]] = set()

    def submit(self, request: Request) -> int:
        number = len(self.prompts)
        self.prompts.append(tuple(request.token_ids))
        self.running[number] = request
        self.most_running = max(self.most_running, len(self.running))
        return number

    def next_answer(self) -> tuple[int, Answer]:
        number = min(self.running)
        request = self.running.pop(number)
        answer = [10_000 + number] * request.max_tokens
        cached = 0
        for end in range(BLOCK, len(request.token_ids), BLOCK):
            if tuple(request.token_ids[:end]) in self._seen:
                cached = end
        tokens = (*request.token_ids, *answer[:-1])
        self._seen.update(tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK))
        return number, Answer(answer, cached, 0.0, 0.0)

    def answer_within(self, timeout_s: float) -> tuple[int, Answer] | None:
        if timeout_s:
            time.sleep(timeout_s)
            return None
        return self.next_answer()


def test_each_turn_goes_on_from_the_answers_before_it() -> None:
    workload = make_workload(LENGTHS, (0, 1), turns=2, vocabulary=900, seed=0)
    served = list(converse(workload, PerfectEngine(), ClosedLoop(2, 2, in_flight=1)))
    assert [turn.session for turn in served] == [0, 1, 0, 1]
    session = workload.sessions[0]
    first, second = served[0], served[2]
    assert first.prompt == session.opening + session.user_turns[0]
    assert second.prompt == (*first.prompt, *[10_000] * 5, *session.user_turns[1])


def test_engine_that_reuses_all_it_has_seen_computes_nothing_redundant() -> None:
    workload = make_workload(LENGTHS, (0, 1, 0, 0), turns=3, vocabulary=900, seed=0)
    served = list(converse(workload, PerfectEngine(), ClosedLoop(4, 3, in_flight=1)))
    found = rates(served, BLOCK)
    assert found.redundant == 0.0
    assert found.recompute_rate == found.floor == found.floor_alone


def test_as_many_requests_run_at_a_time_as_may() -> None:
    workload = make_workload(LENGTHS, range(5), turns=2, vocabulary=900, seed=0)
    engine = PerfectEngine()
    served = list(converse(workload, engine, ClosedLoop(5, 2, in_flight=3)))
    assert engine.most_running == 3
    assert len(served) == len(engine.prompts) == 10


def test_users_think_while_others_are_answered() -> None:
    workload = make_workload(LENGTHS, (0, 1), turns=2, vocabulary=900, seed=0)
    served = list(converse(workload, PerfectEngine(), ClosedLoop(2, 2, 1, think_s=0.05)))
    mine = [turn for turn in served if turn.session == 0]
    assert mine[1].issued_s - mine[0].ended_s >= 0.05
    assert len(served) == 4
