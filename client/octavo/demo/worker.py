"""A worker: answers the questions of one task and says how it went.

With a node's address
it takes from the node what it does not hold itself and puts every full page as soon as it is
computed, prompt and answer alike.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from octavo.client import TIMEOUT_S, Client
from octavo.demo import story
from octavo.demo.chat import ChatFormat
from octavo.demo.checkpoint import MODEL_ID, read_revision
from octavo.demo.inference import Checkpoint, Decoder, open_checkpoint
from octavo.demo.messages import TurnReport, WorkerEnd, WorkerTask, from_line, to_line
from octavo.demo.page_memory import Loaded, PageMemory
from octavo.transformers import kv_layout
from octavo_proto.layout import Layout

NAMESPACE: Final = "default"
"""Where the story's own pages are."""

PACKED_TIMEOUT_S: Final = 30.0
"""A put whose source packs a prompt page by page: 130 pages of 20 ms, on busy cores thrice that."""


class Worker:
    """A chat that goes on from a task's history."""

    def __init__(
        self, task: WorkerTask, opened: Checkpoint, memory: PageMemory | None = None
    ) -> None:
        self._task = task
        self._memory = memory
        self._format = ChatFormat(opened.tokenizer)
        self._decoder = Decoder(opened.model)
        self.history = list(task.history)

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV the worker has."""
        return self._decoder.held_tokens

    def prompt(self, question: str) -> list[int]:
        """Tokens of the conversation with that question, up to where its answer starts."""
        return self.history + (
            self._format.turn(question)
            if self.history
            else self._format.opening(story.SYSTEM, story.first_question(question))
        )

    def answer(self, question: str) -> TurnReport:
        """Answers one question, and appends both to the history."""
        prompt = self.prompt(question)
        decoder, memory = self._decoder, self._memory
        if self._task.forget_each_turn:
            decoder.forget()

        begin = time.perf_counter()
        loaded = Loaded()
        if memory is not None and not decoder.held_tokens:
            loaded = memory.load(prompt, decoder.cache)
        load_s = time.perf_counter() - begin
        computed_tokens = len(prompt) - decoder.held_tokens
        logits = decoder.prefill(prompt)
        first_token = decoder.choose(logits)
        ttft_s = time.perf_counter() - begin

        put: Counter[str] = Counter()
        if memory is not None:
            put.update(memory.save(prompt, decoder.cache))
        tokens, margin = decoder.continue_from(
            logits,
            first_token,
            end_token=self._format.end_token,
            count_max=self._task.new_tokens_max,
        )
        self.history = [*prompt, *self._format.close(tokens)]
        if memory is not None:
            put.update(memory.save(self.history[: decoder.held_tokens], decoder.cache))
        return TurnReport(
            question=question,
            answer=self._format.text(tokens),
            answer_tokens=tuple(tokens),
            prompt_tokens=len(prompt),
            computed_tokens=computed_tokens,
            loaded_tokens=loaded.token_count,
            ttft_s=ttft_s,
            load_s=load_s,
            loaded_bytes=loaded.size_bytes,
            tokens_by_tier=loaded.tokens_by_tier,
            get_statuses=loaded.statuses,
            put_statuses=dict(put),
            margin=margin,
        )


def run(task: WorkerTask, report: Callable[[TurnReport], None]) -> WorkerEnd:
    """Does a whole task; calls ``report`` after each turn."""
    folder = Path(task.checkpoint)
    opened = open_checkpoint(folder, thread_count=task.thread_count)
    with ExitStack() as stack:
        client, memory = None, None
        if task.address is not None:
            layout = kv_layout(
                opened.model,
                "demo",
                model_id=MODEL_ID,
                weights_revision=read_revision(folder),
                page_tokens=story.PAGE_TOKENS,
            )
            namespaces = (NAMESPACE, *map(codec_namespace, task.codecs))
            client = stack.enter_context(
                Client(
                    task.address,
                    layouts=[layout],
                    namespaces=namespaces,
                    timeout_s=PACKED_TIMEOUT_S if task.codecs else TIMEOUT_S,
                )
            )
            client.connect()
            if task.codecs:
                answer_by_codec(task, opened, client, layout, report)
                return _end(client)
            memory = PageMemory(client, layout)
        worker = Worker(task, opened, memory)
        for question in task.questions:
            report(worker.answer(question))
        return _end(client, worker)


def answer_by_codec(
    task: WorkerTask,
    opened: Checkpoint,
    client: Client,
    layout: Layout,
    report: Callable[[TurnReport], None],
) -> None:
    """Reports the task's one question once for each of its codecs.

    The conversation's KV comes from the node once. Then, codec by codec, the prompt's pages go
    into a namespace of that profile and become durable; then a worker that holds nothing
    answers from what the node gives back.
    """
    (question,) = task.questions
    prompt = Worker(task, opened).prompt(question)
    known = Decoder(opened.model)
    PageMemory(client, layout).load(prompt, known.cache)
    known.prefill(prompt)
    for codec in task.codecs:
        place = {"namespace": codec_namespace(codec), "profile": codec}
        client.flush()  # the last answer's pages are on their way still
        before = _bytes_by_tier(client)
        saved = PageMemory(client, layout, **place).save(prompt, known.cache)
        client.flush()
        stored = {tier: held - before[tier] for tier, held in _bytes_by_tier(client).items()}
        turn = Worker(task, opened, PageMemory(client, layout, **place)).answer(question)
        put = Counter(saved) + Counter(turn.put_statuses)
        report(replace(turn, codec=codec, stored_bytes=stored, put_statuses=dict(put)))


def codec_namespace(codec: str) -> str:
    """The namespace in which the demo keeps pages that ``codec`` packed."""
    return f"demo-{codec}"


def _bytes_by_tier(client: Client) -> dict[str, int]:
    return {tier.tier: tier.page_bytes for tier in client.statistics().tiers}


def _end(client: Client | None, worker: Worker | None = None) -> WorkerEnd:
    return WorkerEnd(
        history=() if worker is None else tuple(worker.history),
        held_tokens=0 if worker is None else worker.held_tokens,
        transport="" if client is None else str(client.transport_name),
    )


def main() -> None:
    """The process. Whatever libraries print goes to stderr: stdout carries messages alone."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with out:
        task = from_line(sys.stdin.readline())
        if not isinstance(task, WorkerTask):
            raise SystemExit("the first line must be a task")
        end = run(task, lambda turn: print(to_line(turn), end="", file=out))
        print(to_line(end), end="", file=out)


if __name__ == "__main__":
    main()
