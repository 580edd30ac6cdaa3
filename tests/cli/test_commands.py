"""What the commands print, and how they end."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from octavo.cli.main import main
from octavo.cli.text import bytes_text, seconds_text
from octavo.version import __version__
from octavo_proto.v1 import admin_pb2, admin_pb2_grpc

ANSWER = admin_pb2.GetStatisticsResponse(
    node_id="n1",
    boot_id="b1",
    version=__version__,
    uptime_s=61.0,
    tiers=[
        admin_pb2.TierStatistics(
            tier="memory", capacity_bytes=1 << 40, used_bytes=1 << 39, page_bytes=7, page_count=9
        )
    ],
    counters={"put_bytes": 2**60, "pages_stored": 12_345},
    gauges={"sessions": 2.0},
)


class _Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, answer: admin_pb2.GetStatisticsResponse) -> None:
        self._answer = answer

    def GetStatistics(  # noqa: N802  the protocol's name
        self, request: admin_pb2.GetStatisticsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetStatisticsResponse:
        del request, context
        return self._answer


@contextmanager
def admin_port(folder: Path, answer: admin_pb2.GetStatisticsResponse) -> Generator[str]:
    """The real Admin protocol over a real socket, with an answer that is known."""
    address = f"unix:{folder}/admin.sock"
    server = grpc.server(futures.ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(_Admin(answer), server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        stopped: threading.Event = server.stop(0)
        stopped.wait()


def test_stats_json_has_every_figure_as_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_port(tmp_path, ANSWER) as address:
        assert main(["stats", "--address", address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tiers"][0]["used_bytes"] == 1 << 39
    assert found["counters"] == {"put_bytes": 2**60, "pages_stored": 12_345}
    assert found["gauges"] == {"sessions": 2.0}
    assert found["problems"] == []


def test_stats_table_shows_figures_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_port(tmp_path, ANSWER) as address:
        assert main(["stats", "--address", address]) == 0
    shown = capsys.readouterr().out
    for expected in ("n1", "1 min 1 s", "12,345", "50.0%", "1.0 TiB"):
        assert expected in shown


def test_absent_node_is_one_helpful_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", "--address", f"unix:{tmp_path}/absent.sock"]) == 1
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "is `octavo serve` running?" in errors


def test_socket_that_nobody_listens_on_is_one_helpful_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dead.sock").write_text("")
    assert main(["stats", "--address", f"{tmp_path}/dead.sock"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["a b:1", "nowhere", "host:99999", "unix:relative"])
def test_wrong_address_is_a_usage_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--address", address]) == 2
    assert address in capsys.readouterr().err


def test_unknown_command_and_option_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statz"]) == 2
    assert main(["stats", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("command", ["stats", "doctor", "demo"])
def test_help_gives_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert f"octavo {command}" in shown


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (23_040, "22.5 KiB"),
        (1 << 32, "4.0 GiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert bytes_text(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (356_400, "4 d 3 h")],
)
def test_durations_for_people(duration_s: float, text: str) -> None:
    assert seconds_text(duration_s) == text
