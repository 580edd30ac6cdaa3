"""``octavo bench rag``: what it says when it cannot run, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from octavo.bench import rag
from octavo.bench.vllm_child import NoEngineError
from octavo.cli.main import main

ROW = {
    "recompute_rate": 0.21,
    "floor": 0.2,
    "redundant": 0.0125,
    "ttft_p50_ms": 1234.5,
    "ttft_p90_ms": 2345.6,
    "tokens_per_s": 9.87,
    "hits": {"engine": 96, "memory": 640, "nvme": 32, "computed": 1717},
}


def run_like(found: Mapping[str, object]) -> Callable[..., Mapping[str, object]]:
    def run(**_options: object) -> Mapping[str, object]:
        return found

    return run


def figures(*, answers_equal: bool = True) -> dict[str, object]:
    return {"rows": {"octavo": dict(ROW)}, "answers_equal": answers_equal, "sessions": 8}


def test_engine_has_to_be_named_and_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rag"]) == 2
    assert capsys.readouterr().err == "octavo: bench rag needs --engine; there is: vllm\n"
    assert main(["bench", "rag", "--engine", "abacus"]) == 2
    assert "has no engine 'abacus'; there is: vllm" in capsys.readouterr().err


def test_options_reach_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def run(**options: object) -> dict[str, object]:
        asked.update(options)
        return figures()

    monkeypatch.setattr(rag, "run", run)
    command = "bench rag --engine vllm --json --sessions 9 --in-flight 4 --think-s 1.5 --zipf 0.5"
    assert main(command.split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures()
    assert asked["sessions"] == 9
    assert asked["in_flight"] == 4
    assert asked["think_s"] == 1.5
    assert asked["zipf"] == 0.5
    assert asked["scale"] == 0.1


def test_rows_that_answer_differently_are_shown_and_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rag, "run", run_like(figures(answers_equal=False)))
    assert main(["bench", "rag", "--engine", "vllm", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["answers_equal"] is False
    assert said.err == "octavo: the rows' answers differ\n"


def test_table_shows_rates_times_and_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(rag, "run", run_like(figures()))
    assert main(["bench", "rag", "--engine", "vllm"]) == 0
    shown = capsys.readouterr().out
    for expected in ("octavo", "21.00%", "1.25%", "1,234 / 2,346", "9.9", "640", "1,717"):
        assert expected in shown


def test_machine_without_vllm_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_engine() -> None:
        raise NoEngineError("this needs vLLM: install it")

    monkeypatch.setattr("octavo.bench.rag.command.engine_python", no_engine)
    assert main(["bench", "rag", "--engine", "vllm"]) == 1
    assert capsys.readouterr().err == "octavo: this needs vLLM: install it\n"


def test_engine_whose_cache_holds_everything_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("octavo.bench.rag.command.engine_python", lambda: None)
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 500,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["bench", "rag", "--engine", "vllm", "--model", str(tmp_path)]
    assert main([*command, "--sessions", "2", "--in-flight", "2"]) == 1
    assert "2 requests in flight need as much KV as all 2 sessions" in capsys.readouterr().err
