"""Messages survive the pipe between the demo and its workers."""

from __future__ import annotations

import pytest

from octavo.demo.messages import (
    Message,
    TurnReport,
    WorkerEnd,
    WorkerTask,
    from_line,
    to_line,
)

TURN = TurnReport(
    question="Why?\nReally?",
    answer="Because.",
    answer_tokens=(3, 1, 2),
    prompt_tokens=100,
    computed_tokens=4,
    loaded_tokens=96,
    ttft_s=0.25,
    load_s=0.05,
    tokens_by_tier={"memory": 96},
    get_statuses={"DONE": 6},
    put_statuses={"STORED": 1},
)


@pytest.mark.parametrize(
    "message",
    [
        WorkerTask("folder", ("one?", "two?"), (1, 2, 3), "unix:/x", forget_each_turn=True),
        WorkerTask("folder", ("one?",), codecs=("raw", "int8")),
        TURN,
        WorkerEnd(history=(1, 2), held_tokens=2, transport="shm"),
    ],
)
def test_a_message_is_one_line_and_comes_back_equal(message: Message) -> None:
    line = to_line(message)
    assert line.count("\n") == 1
    assert from_line(line) == message


@pytest.mark.parametrize("line", ["{}", '{"kind": "Popen"}', "loading weights"])
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"no message|Expecting"):
        from_line(line)
