"""The demo's story on a toy model and a real node: three workers, one killed node, same answers."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.demo.toy import make_checkpoint

from octavo.client import Client
from octavo.codec import Profile, codec_names
from octavo.demo import story
from octavo.demo.inference import Checkpoint
from octavo.demo.messages import TurnReport, WorkerTask
from octavo.demo.page_memory import PageMemory
from octavo.demo.processes import Places, ProcessError, demo_node, run_worker
from octavo.demo.worker import Worker, answer_by_codec, codec_namespace
from octavo.local_node import LocalNode
from octavo.transformers import kv_layout

QUESTIONS = ("Who keeps the light?", "And who relieves them?", "When does the boat call?")


@pytest.fixture(scope="module")
def toy() -> Checkpoint:
    return make_checkpoint()


@pytest.fixture(autouse=True)
def _short_document(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_question(question: str) -> str:
        return f"Nine people.\n\n{question}"

    monkeypatch.setattr(story, "first_question", first_question)


@contextmanager
def memory_at(node: LocalNode, toy: Checkpoint) -> Generator[PageMemory]:
    layout = kv_layout(toy.model, "toy", model_id="toy", weights_revision="1")
    with Client(node.address, layouts=[layout]) as client:
        client.connect()
        yield PageMemory(client, layout)


def make_worker(
    toy: Checkpoint, memory: PageMemory | None = None, after: Worker | None = None
) -> Worker:
    history = () if after is None else tuple(after.history)
    return Worker(WorkerTask("", (), history, new_tokens_max=24), toy, memory)


def test_chat_outlives_worker_and_node(toy: Checkpoint, tmp_path: Path) -> None:
    alone = make_worker(toy)
    expected = [alone.answer(question).answer_tokens for question in QUESTIONS]
    with demo_node(Places(tmp_path, tmp_path)) as node:
        node.start()
        with memory_at(node, toy) as memory:
            first = make_worker(toy, memory)
            turns = [first.answer(QUESTIONS[0])]
        with memory_at(node, toy) as memory:
            second = make_worker(toy, memory, after=first)
            turns.append(second.answer(QUESTIONS[1]))
        with node.client() as client:
            assert client.flush().volatile_pages == 0
        node.kill()
        node.start()
        with memory_at(node, toy) as memory:
            third = make_worker(toy, memory, after=second)
            turns.append(third.answer(QUESTIONS[2]))
        node.stop()
    assert [turn.answer_tokens for turn in turns] == expected
    assert turns[0].loaded_tokens == 0
    assert turns[1].tokens_by_tier == {"memory": first.held_tokens // 16 * 16}
    assert turns[2].tokens_by_tier == {"nvme": second.held_tokens // 16 * 16}
    for turn in turns:
        assert set(turn.put_statuses) == {"STORED"}
        assert turn.computed_tokens + turn.loaded_tokens == turn.prompt_tokens


def test_each_codec_answers_from_its_own_pages(toy: Checkpoint, tmp_path: Path) -> None:
    alone = make_worker(toy)
    alone.answer(QUESTIONS[0])
    history = tuple(alone.history)
    expected = alone.answer(QUESTIONS[1]).answer_tokens
    codecs = codec_names()
    task = WorkerTask("", QUESTIONS[1:2], history, codecs=codecs, new_tokens_max=24)
    layout = kv_layout(toy.model, "toy", model_id="toy", weights_revision="1")
    namespaces = ("default", *map(codec_namespace, codecs))
    turns: list[TurnReport] = []
    with demo_node(Places(tmp_path, tmp_path)) as node:
        node.start()
        with Client(node.address, layouts=[layout], namespaces=namespaces) as client:
            answer_by_codec(task, toy, client, layout, turns.append)
    assert [turn.codec for turn in turns] == list(codecs)
    assert turns[0].answer_tokens == expected
    for turn in turns:
        assert turn.tokens_by_tier == {"memory": (turn.prompt_tokens - 1) // 16 * 16}
        assert set(turn.put_statuses) == {"STORED"}
        assert turn.stored_bytes["memory"] == turn.stored_bytes["nvme"]
    stored = {turn.codec: turn.stored_bytes["memory"] for turn in turns}
    pages = turns[0].prompt_tokens // 16
    assert stored["raw"] == pages * layout.raw_page_bytes
    for codec in codecs:
        expected_bytes = sum(Profile.named(codec).page_bytes(layout, at) for at in range(pages))
        assert stored[codec] == expected_bytes


def test_other_weights_find_nothing(toy: Checkpoint, tmp_path: Path) -> None:
    with demo_node(Places(tmp_path, tmp_path)) as node:
        node.start()
        with memory_at(node, toy) as memory:
            make_worker(toy, memory).answer(QUESTIONS[0])
        other = kv_layout(toy.model, "other", model_id="toy", weights_revision="2")
        with Client(node.address, layouts=[other]) as client:
            turn = make_worker(toy, PageMemory(client, other)).answer(QUESTIONS[0])
    assert turn.loaded_tokens == 0


def test_leaving_the_block_ends_the_node(tmp_path: Path) -> None:
    def started() -> int:
        with demo_node(Places(tmp_path, tmp_path)) as node:
            node.start()
            with node.client() as client:
                client.connect()
            return node.pid

    pid = started()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    turns: list[TurnReport] = []
    task = WorkerTask(str(tmp_path / "nowhere"), ("?",))
    with pytest.raises(ProcessError, match=r"worker x ended with code 1\n  \| (.|\n)*nowhere"):
        run_worker("x", task, Places(tmp_path, tmp_path), turns.append)
    assert turns == []
