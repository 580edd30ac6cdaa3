"""What the codecs were built to reach, on the default model and three of the texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.demo.checkpoint import FOLDER_NAME, REVISION_FILE, cache_folder

TEXTS = ("prose", "python", "maths")

KL_RATIO_MAX = {"fp8_e4m3": 0.35, "int8": 0.02, "int6": 0.15, "int5": 0.45}
"""KL over that of the plain e4m3 cast."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_codecs_are_as_close_to_the_model_as_promised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not (cache_folder() / FOLDER_NAME / REVISION_FILE).is_file():
        pytest.skip("the demo's checkpoint has not been made here: run `octavo demo`")
    texts = [part for name in TEXTS for part in ("--texts", name)]
    assert main(["quality", *texts, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    codecs = found["codecs"]
    for name, limit in KL_RATIO_MAX.items():
        assert codecs[name]["kl"] <= limit * codecs["cast_e4m3"]["kl"], name
    assert codecs["fp8_e5m2"]["kl"] <= 0.5 * codecs["cast_e5m2"]["kl"]
    for name in ("fp8_e5m2", "fp8_e4m3", "int8", "int6", "int5"):
        assert abs(codecs[name]["dppl_pct"]) < 0.5, name
    assert codecs["int8"]["bytes_ratio"] < 0.58
