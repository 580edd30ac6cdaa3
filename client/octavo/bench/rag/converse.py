"""Sends a workload's turns to an engine, each with the answers that this engine gave before."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Protocol

from octavo.bench.rag.loop import ClosedLoop
from octavo.bench.rag.rates import ServedTurn
from octavo.bench.rag.workload import Workload
from octavo.bench.vllm_jobs import Answer, Request


class Engine(Protocol):
    """Answers several requests at a time."""

    def submit(self, request: Request) -> int:
        """Sends a request; its number."""
        ...

    def next_answer(self) -> tuple[int, Answer]:
        """Waits for the answer to any request: its number, and the answer."""
        ...

    def answer_within(self, timeout_s: float) -> tuple[int, Answer] | None:
        """The same, or None if none comes within ``timeout_s``."""
        ...


def converse(workload: Workload, engine: Engine, loop: ClosedLoop) -> Generator[ServedTurn]:
    """Every turn as soon as it is answered. Nobody waits for anything but answers and ``loop``."""
    said = [list(session.opening) for session in workload.sessions]
    turns = [iter(session.user_turns) for session in workload.sessions]
    running: dict[int, tuple[int, float]] = {}
    begin_s = time.monotonic()
    while running or not loop.is_done:
        while (session := loop.take(time.monotonic() - begin_s)) is not None:
            said[session] += next(turns[session])
            issued_s = time.monotonic()
            request = Request(tuple(said[session]), workload.lengths.answer_tokens)
            running[engine.submit(request)] = session, issued_s
        wait_s = loop.wait_s(time.monotonic() - begin_s)
        if running:
            got = engine.next_answer() if wait_s is None else engine.answer_within(wait_s)
        else:
            assert wait_s is not None, "nobody asks and nobody will"
            time.sleep(wait_s)
            continue
        if got is None:
            continue
        number, answer = got
        session, issued_s = running.pop(number)
        loop.answered(session, time.monotonic() - begin_s)
        yield ServedTurn(
            session=session,
            prompt=tuple(said[session]),
            answer=tuple(answer.token_ids),
            cached_tokens=answer.cached_token_count,
            issued_s=issued_s,
            first_token_s=issued_s + answer.ttft_s,
            ended_s=issued_s + answer.duration_s,
        )
        said[session] += answer.token_ids
