"""vLLM alone: the tiny model answers the same in each mode, so that a difference is Octavo's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import BLOCK_TOKENS, Mode, VllmEngine

REQUESTS = [Request(prompt(seed, 150 + 170 * seed)) for seed in range(4)]


@pytest.mark.parametrize(
    "mode",
    [Mode.PROCESSES, pytest.param(Mode.TWO_WORKERS, marks=pytest.mark.long)],
    ids=lambda mode: mode.value,
)
def test_processes_and_batches_change_no_token(
    mode: Mode, reference: Reference, tmp_path: Path
) -> None:
    expected = reference.token_ids(REQUESTS)
    with VllmEngine(tmp_path, mode=mode) as engine:
        assert engine.generate(REQUESTS).token_ids == expected


def test_tokens_hang_on_each_block_of_the_prompt(reference: Reference) -> None:
    block_count = 30
    whole = prompt(7, block_count * BLOCK_TOKENS)
    requests = [Request(whole)]
    for start in range(0, len(whole), BLOCK_TOKENS):
        other_block = prompt(8, BLOCK_TOKENS)
        requests.append(Request([*whole[:start], *other_block, *whole[start + BLOCK_TOKENS :]]))
    answers = reference.token_ids(requests)
    assert all(answer != answers[0] for answer in answers[1:])
