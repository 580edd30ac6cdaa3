"""What the doctor finds, and what it makes of it."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest
from tests.cli.test_commands import ANSWER, admin_port

from octavo.cli.doctor.disk import check_direct_io, check_disk, check_space
from octavo.cli.doctor.finding import Verdict
from octavo.cli.doctor.memory import (
    check_huge_pages,
    check_memlock,
    check_room,
    check_sealing,
    read_meminfo,
)
from octavo.cli.doctor.software import check_node, version_tuple
from octavo.cli.main import main
from octavo.version import __version__

MEMINFO = read_meminfo(
    "MemTotal:  1000 kB\nMemAvailable:    512 kB\nHugePages_Free:   3\nHugepagesize:   2048 kB\n"
)


def test_meminfo_is_read_in_bytes_and_counts() -> None:
    assert MEMINFO["MemAvailable"] == 512 << 10
    assert MEMINFO["HugePages_Free"] == 3


@pytest.mark.parametrize(
    ("memory_bytes", "limit", "verdict"),
    [
        (1 << 20, None, Verdict.OK),
        (1 << 20, "max", Verdict.OK),
        (64 << 20, None, Verdict.WARN),
        (2 << 20, str(1 << 20), Verdict.FAIL),
    ],
)
def test_room_for_the_arena(memory_bytes: int, limit: str | None, verdict: Verdict) -> None:
    assert check_room(memory_bytes, MEMINFO, limit).verdict is verdict


def test_huge_pages_say_how_many_to_reserve() -> None:
    assert check_huge_pages(6 << 20, MEMINFO, "5.10.0-8-amd64", None).verdict is Verdict.OK
    short = check_huge_pages((8 << 20) + 1, MEMINFO, "5.10.0-8-amd64", "always [never] deny")
    assert short.verdict is Verdict.WARN
    assert "vm.nr_hugepages=5" in short.action


@pytest.mark.parametrize(
    ("release", "shmem_enabled", "verdict"),
    [
        ("6.1.0-13-amd64", "always [never] deny", Verdict.OK),
        ("6.18", "always never [deny]", Verdict.WARN),
        ("6.18", None, Verdict.WARN),
        ("6.0.9", "always [never] deny", Verdict.WARN),
        ("10.0", "[always] never deny", Verdict.OK),
    ],
)
def test_huge_pages_need_not_be_reserved_where_the_kernel_makes_them(
    release: str, shmem_enabled: str | None, verdict: Verdict
) -> None:
    assert check_huge_pages(1 << 30, MEMINFO, release, shmem_enabled).verdict is verdict


def test_memlock() -> None:
    assert check_memlock(1 << 30, resource.RLIM_INFINITY).verdict is Verdict.OK
    assert check_memlock(1 << 30, 1 << 31).verdict is Verdict.OK
    assert check_memlock(1 << 30, 1 << 20).verdict is Verdict.WARN


def test_sealing_failure_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_sealing().verdict is Verdict.OK

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert check_sealing().verdict is Verdict.FAIL


def test_direct_io_leaves_no_file_behind(tmp_path: Path) -> None:
    assert check_direct_io(tmp_path).verdict in (Verdict.OK, Verdict.WARN)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "verdict"), [(errno.EINVAL, Verdict.WARN), (errno.EIO, Verdict.FAIL)]
)
def test_refused_direct_io_is_a_warning_and_an_error_is_not(
    code: int, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def fail_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", fail_direct)
    assert check_direct_io(tmp_path).verdict is verdict
    assert list(tmp_path.iterdir()) == []


def test_directory_that_is_not_writable_fails() -> None:
    assert check_direct_io(Path("/proc")).verdict is Verdict.FAIL


def test_space_counts_what_the_tier_has_already(tmp_path: Path) -> None:
    assert check_space(tmp_path, 1 << 20, 0).verdict is Verdict.OK
    assert check_space(tmp_path, 1 << 50, 0).verdict is Verdict.WARN
    assert check_disk(tmp_path / "absent", 1, 0)[0].verdict is Verdict.WARN


def test_absent_node_is_a_warning_and_a_sick_one_a_failure(tmp_path: Path) -> None:
    assert check_node(f"unix:{tmp_path}/absent.sock").verdict is Verdict.WARN
    with admin_port(tmp_path, ANSWER) as address:
        assert check_node(address).verdict is Verdict.OK
    sick = type(ANSWER)()
    sick.CopyFrom(ANSWER)
    sick.problems.append("the device is out of service")
    with admin_port(tmp_path, sick) as address:
        found = check_node(address)
    assert found.verdict is Verdict.FAIL
    assert "out of service" in found.found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("6.33.6", (6, 33, 6)), ("2.13.0+cpu", (2, 13, 0)), ("1.76rc1", (1, 76)), ("", ())],
)
def test_versions_compare_as_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_tuple(text) == numbers


def test_json_report_has_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--json", "--memory-bytes", "1MiB", "--nvme-bytes", "1MiB"]
    arguments += ["--nvme-dir", str(tmp_path), "--address", f"{tmp_path}/absent.sock"]
    code = main(arguments)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if found["healthy"] else 1)
    checks = {each["check"]: each for each in found["findings"]}
    for name in ("versions", "grpcio", "memory", "huge pages", "memlock", "sealed memory"):
        assert name in checks
    for name in ("O_DIRECT", "disk space", "GPU", "node"):
        assert name in checks
    assert __version__ in checks["versions"]["found"]
    assert checks["node"]["action"] == "octavo serve"


def test_wrong_settings_are_a_failure_that_names_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--memory-bytes", "1XB"]) == 1
    assert "--memory-bytes: 'XB' is no unit of bytes" in capsys.readouterr().out.replace("\n", "")
