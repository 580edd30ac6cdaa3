"""Events tell what is on the node, once it is, and when it is found gone."""

from __future__ import annotations

import pytest

from octavo.vllm import events
from octavo.vllm.events import EventLog, RemovedBlocks, StoredBlocks
from octavo.vllm.orders import PageOrder, SaveReport

HASHES = [bytes([number]) * 32 for number in range(6)]
TOKENS = list(range(200))


def log(*, page_tokens: int = 32, reports: int = 1) -> EventLog:
    return EventLog(32, page_tokens, reports)


def test_blocks_are_announced_when_they_are_visible_and_not_when_ordered() -> None:
    found = log()
    found.ordered(PageOrder("r", 1, 4, (7, 8, 9), 5), HASHES, TOKENS, "lora", "session")
    assert found.take() == []
    found.saved(SaveReport(5, 1, 3))
    assert found.take() == [
        StoredBlocks((HASHES[1], HASHES[2]), HASHES[0], tuple(TOKENS[32:96]), "lora", "session")
    ]
    found.saved(SaveReport(5, 3, 4))
    assert found.take() == [
        StoredBlocks((HASHES[3],), HASHES[2], tuple(TOKENS[96:128]), "lora", "session")
    ]


def test_a_block_counts_when_every_rank_has_stored_its_part() -> None:
    found = log(reports=2)
    found.ordered(PageOrder("r", 0, 1, (7,), 5), HASHES, TOKENS)
    found.saved(SaveReport(5, 0, 1))
    assert found.take() == []
    found.saved(SaveReport(5, 0, 1))
    assert len(found.take()) == 1


def test_a_block_of_several_pages_counts_when_all_of_them_are_there() -> None:
    found = log(page_tokens=16)
    found.ordered(PageOrder("r", 0, 5, (7, 8, 9), 5), HASHES, TOKENS)
    found.saved(SaveReport(5, 1, 3))
    assert found.take() == []
    found.saved(SaveReport(5, 0, 1))
    assert found.take() == [StoredBlocks((HASHES[0],), None, tuple(TOKENS[:32]))]
    found.saved(SaveReport(5, 3, 5))
    assert found.take() == [StoredBlocks((HASHES[1],), HASHES[0], tuple(TOKENS[32:64]))]


def test_a_match_announces_what_is_there_once() -> None:
    found = log()
    found.matched(3, HASHES, TOKENS)
    assert found.take() == [StoredBlocks(tuple(HASHES[:3]), None, tuple(TOKENS[:96]))]
    found.matched(3, HASHES, TOKENS)
    assert found.take() == []


def test_a_match_that_is_shorter_than_what_was_announced_withdraws_the_rest() -> None:
    found = log()
    found.matched(4, HASHES, TOKENS)
    found.take()
    found.matched(1, HASHES, TOKENS)
    assert found.take() == [RemovedBlocks(tuple(HASHES[1:4]))]


def test_a_reset_withdraws_everything_and_forgets_what_was_ordered() -> None:
    found = log()
    found.matched(2, HASHES, TOKENS)
    found.ordered(PageOrder("r", 2, 3, (7,), 5), HASHES, TOKENS)
    found.take()
    found.forget_all()
    found.saved(SaveReport(5, 2, 3))
    assert found.take() == [RemovedBlocks(tuple(HASHES[:2]))]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "ANNOUNCED_MAX", 4)
    found = log()
    found.matched(6, HASHES, TOKENS)
    assert found.take()[1:] == [RemovedBlocks(tuple(HASHES[:2]))]
