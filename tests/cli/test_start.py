"""``octavo serve`` refuses what cannot work: one line each, exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_server.start import main


def test_flags_without_and_with_values(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prefault", "--http=off", "--memory-bytes", "8GiB", "--print-settings"]
    assert main(arguments, {}) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prefault"] is True
    assert found["http"] is None
    assert found["memory_bytes"] == 8 << 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memry-bytes", "1"], "--memry-bytes is no setting; did you mean 'memory_bytes'?"),
        (["--memory-byte=1"], "did you mean 'memory_bytes'?"),
        (["--memory-bytes"], "--memory-bytes"),
        (["--memory-bytes", "-5"], "--memory-bytes"),
        (["stray"], "stray is no setting"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml: cannot be read"),
        (["--http", "nowhere"], "--http: 'nowhere' is no address"),
        (["--listen-unix", "/proc/octavo/octavo.sock"], "/proc/octavo: cannot be made"),
    ],
)
def test_refusal_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, {}) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert message in errors


def test_every_place_is_checked_before_the_node_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    base = ["--listen-unix", str(tmp_path / "octavo.sock"), "--http", "off"]
    wrong = [
        ["--state-dir", "/proc/octavo"],
        ["--nvme-dir", "/proc/octavo", "--nvme-bytes", "1GiB"],
        ["--memory-bytes", "900TiB"],
        ["--http", "192.0.2.1:80"],
        ["--listen-tcp", "192.0.2.1:80", "--allow-unauthenticated-tcp"],
    ]
    for extra in wrong:
        assert main([*base, *extra], {}) == 2
        assert extra[0][2:].replace("-", "_") in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"], {})
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "--nvme-free-space-guard-bytes" in text
    assert "examples:" in text


@pytest.mark.parametrize("command", [["-m", "octavo_server"], ["-m", "octavo.cli", "serve"]])
def test_both_ways_to_start_a_node_are_one(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command, "--print-settings", "--node-id", "n1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert json.loads(done.stdout)["node_id"] == "n1"
