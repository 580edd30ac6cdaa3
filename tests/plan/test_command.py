"""What ``octavo plan`` prints and draws, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

COMMAND = ["plan", "--model", "llama-3.3-70b", "--context", "131072", "--concurrency", "256"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_json_says_what_was_promised(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *COMMAND, "--codec", "raw")
    assert found["kv_bytes_total"] == 10 * 2**40
    assert found["bytes_per_token"] == 327_680
    for codec in ("fp8_e5m2", "fp8_e4m3", "int8"):
        sessions = found["codecs"][codec]["sessions_per_gpu"]
        assert sessions >= 1.8 * found["sessions_per_gpu"] > 0


def test_json_of_deepseek(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "plan", "--model", "deepseek-v3", "--codec", "fp8_e4m3")
    assert found["bytes_per_token_layer"] == 656
    assert found["kind"] == "MLA"


def test_json_leads_with_the_chosen_codec(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *COMMAND, "--codec", "int6")
    assert found["codec"] == "int6"
    assert found["codecs"]["int6"].items() <= found.items()
    assert planned(capsys, *COMMAND)["codec"] == "fp8_e5m2"
    assert planned(capsys, *COMMAND, "--codec", "best")["codec"] == "int8"
    assert planned(capsys, *COMMAND, "--kv-dtype", "float8_e5m2")["codec"] == "raw"


def test_json_names_links_that_beat_computing(capsys: pytest.CaptureFixture[str]) -> None:
    slow = planned(capsys, *COMMAND, "--prefill-rate", "20000", "--codec", "raw")
    assert slow["recompute_s"] == pytest.approx(6.5536)
    assert "nvme_gen4" in slow["links_faster_than_recompute"]
    quick = planned(capsys, *COMMAND, "--prefill-rate", "40000", "--codec", "raw")
    assert "nvme_gen4" not in quick["links_faster_than_recompute"]
    assert quick["break_even_gb_per_s"] == pytest.approx(42.94967296 / 3.2768)


def test_tables_show_figures_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    shown = capsys.readouterr().out
    for expected in ("327,680 B", "10.0 TiB", "fp8_e4m3", "NVMe Gen5", "break-even", "8 KV heads"):
        assert expected in shown


def test_known_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "plan", "--list-models")
    assert {"model": "deepseek-v3", "bytes_per_token": 70_272}.items() <= next(
        row for row in found["models"] if row["model"] == "deepseek-v3"
    ).items()
    assert main(["plan", "--list-models"]) == 0
    assert "68.6 KiB" in capsys.readouterr().out


def test_a_checkpoint_folder_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(capsys, "plan", "--model", str(tmp_path), "--codec", "raw")
    assert found["bytes_per_token"] == 23_040
    assert found["model"] == tmp_path.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-9"], "known models: smollm2-135m"),
        (["--model", "/"], "config.json"),
        (["--codec", "zip"], "has raw, fp8_e5m2"),
        (["--codec", "int8", "--kv-dtype", "int8"], "KV in int8 has raw"),
        (["--gpu", "tpu"], "known are a100-40gb"),
        (["--tp", "3"], "divisor or a multiple"),
        (["--plot", "no/such/folder/x.png"], "cannot draw"),
    ],
)
def test_wrong_use_is_said_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_is_drawn(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{ending}"
    assert main(["plan", "--plot", str(path)]) == 0
    assert path.stat().st_size > 10_000
    assert main(["plan", "--plot", str(tmp_path / "plan.xyz")]) == 2
    assert "cannot draw" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "octavo.plan.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["plan", "--plot", str(tmp_path / "x.png")]) == 1
    assert "pip install 'octavo[plots]'" in capsys.readouterr().err
