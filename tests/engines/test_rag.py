"""Chats about documents on a real engine: what was computed once is not computed again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from octavo.bench.rag import run

pytestmark = pytest.mark.long

REDUNDANT_MAX = 0.02


@pytest.fixture(scope="module")
def measured() -> Mapping[str, Any]:
    return run(sessions=5, turns=3, documents=5, in_flight=2, in_process=True)


def test_rows_answer_alike(measured: Mapping[str, Any]) -> None:
    assert measured["answers_equal"] is True
    # Answers that hang on what was asked: of one and the same, equality would say little.
    assert measured["distinct_answers"] > measured["requests"] // 2 == 7


def test_node_leaves_next_to_nothing_to_compute_again(measured: Mapping[str, Any]) -> None:
    rows = measured["rows"]
    print({name: row["redundant"] for name, row in rows.items()})
    assert rows["octavo"]["redundant"] <= REDUNDANT_MAX
    assert rows["octavo"]["hits"]["memory"] > 0


def test_engine_alone_computes_again_what_it_had_no_room_for(measured: Mapping[str, Any]) -> None:
    rows = measured["rows"]
    assert rows["none"]["recompute_rate"] == rows["none"]["redundant"] == 1.0
    assert rows["engine_prefix"]["redundant"] > 10 * REDUNDANT_MAX
    assert rows["engine_prefix"]["hits"]["memory"] == 0
