"""A real node, started and stopped the way an operator does it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo_server.cache.counters import COUNTER_NAMES

START_S = 30.0
STOP_S = 15.0


@dataclass(frozen=True)
class Served:
    """A node that answers."""

    process: subprocess.Popen[bytes]
    address: str
    http: str
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a path of the HTTP port."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments_of(folder: Path, http: str) -> list[str]:
    return [
        *("--listen-unix", f"{folder}/octavo.sock", "--http", http),
        *("--memory-bytes", "64MiB", "--staging-ring-bytes", "4MiB", "--node-id", "n1"),
    ]


@contextmanager
def serving(folder: Path, *extra: str) -> Generator[Served]:
    """A node below ``folder``; it is killed if the test leaves it running."""
    folder.chmod(0o700)
    http = f"127.0.0.1:{free_port()}"
    log = folder / "node.log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo_server", *arguments_of(folder, http), *extra],
            stdout=out,
            stderr=out,
            env=environ,
        )
    served = Served(process, f"unix:{folder}/octavo.sock", http, log)
    try:
        wait_until_ready(served)
        yield served
    finally:
        process.kill()
        process.wait()


def wait_until_ready(served: Served) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert served.process.poll() is None, served.log.read_text()
        try:
            if served.get("/readyz")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not ready after {START_S} s: {served.log.read_text()}")


def test_node_tells_one_story_on_every_port_and_stops_on_sigterm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path) as node:
        assert node.get("/healthz")[0] == 200
        metrics = node.get("/metrics")[1]
        assert main(["stats", "--address", node.address, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["node_id"] == "n1"
        assert set(COUNTER_NAMES) <= set(found["counters"])
        for name in found["counters"]:
            assert re.search(rf"^octavo_{name}_total ", metrics, re.M), name
        assert [tier["tier"] for tier in found["tiers"]] == ["memory"]
        assert found["tiers"][0]["capacity_bytes"] == 64 << 20
        assert main(["doctor", "--address", node.address, "--json"]) in (0, 1)
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert [each["verdict"] for each in findings if each["check"] == "node"] == ["ok"]

        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(STOP_S) == 0
    assert main(["stats", "--address", node.address]) == 1


def test_second_node_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as node:
        second = subprocess.run(
            [sys.executable, "-m", "octavo_server", *arguments_of(tmp_path, "off")],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert second.returncode == 2
        assert len(second.stderr.splitlines()) == 1
        assert f"pid {node.process.pid}" in second.stderr
        assert main(["stats", "--address", node.address, "--json"]) == 0


def test_killed_node_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        with serving(tmp_path) as node:
            node.process.kill()
            node.process.wait()


def test_second_node_on_the_nvme_directory_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir(mode=0o700)
    disk = ["--nvme-dir", f"{tmp_path}/nvme", "--nvme-bytes", "64MiB"]
    disk += ["--nvme-free-space-guard-bytes", "0"]
    with serving(tmp_path / "one", *disk):
        second = subprocess.run(
            [
                *(sys.executable, "-m", "octavo_server"),
                *arguments_of(tmp_path / "two", "off"),
                *disk,
            ],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    assert second.returncode == 2
    assert f"{tmp_path}/nvme" in second.stderr


def test_json_log_lines_parse(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-format", "json") as node:
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(STOP_S) == 0
        lines = node.log.read_text().splitlines()
    assert lines
    assert all({"time", "level", "message"} <= set(json.loads(line)) for line in lines)
