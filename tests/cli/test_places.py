"""What a node checks before it starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo_server.addresses import HostPort
from octavo_server.places import (
    PlaceError,
    SocketClaim,
    make_private_directory,
    make_writable_directory,
    require_free_port,
    require_memory,
)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")


@contextmanager
def listener() -> Generator[HostPort]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        yield HostPort("127.0.0.1", taken.getsockname()[1])


def test_runtime_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "octavo"
    make_private_directory(directory, allow_open=False)
    assert directory.stat().st_mode & 0o777 == 0o700
    make_private_directory(directory, allow_open=False)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777])
def test_directory_that_others_can_enter_is_refused_unless_allowed(
    mode: int, tmp_path: Path
) -> None:
    directory = tmp_path / "octavo"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(PlaceError, match="other users can enter it"):
        make_private_directory(directory, allow_open=False)
    make_private_directory(directory, allow_open=True)


@AS_ROOT
def test_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "octavo"
    directory.mkdir(mode=0o700)
    os.chown(directory, 12_345, 12_345)
    with pytest.raises(PlaceError, match="belongs to uid 12345"):
        make_private_directory(directory, allow_open=False)


@AS_ROOT
def test_link_put_there_by_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "octavo"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, 12_345, 12_345, follow_symlinks=False)
    with pytest.raises(PlaceError, match="belongs to uid 12345"):
        make_private_directory(link, allow_open=False)


def test_file_in_the_way_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "octavo").write_text("")
    with pytest.raises(PlaceError, match="octavo: cannot be made"):
        make_private_directory(tmp_path / "octavo", allow_open=False)


def test_directory_that_is_not_writable_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"nvme_dir /proc/octavo: is not writable"):
        make_writable_directory("nvme_dir", Path("/proc/octavo"))


def test_port_in_use_is_refused() -> None:
    with listener() as address, pytest.raises(PlaceError, match=f"http {address}: cannot listen"):
        require_free_port("http", address)
    require_free_port("http", address)


def test_host_of_another_machine_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"listen_tcp 192\.0\.2\.1:0"):
        require_free_port("listen_tcp", HostPort("192.0.2.1", 0))


def test_arena_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(PlaceError, match="this machine has"):
        require_memory(1 << 50)


def test_second_node_cannot_take_a_running_nodes_socket(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    with SocketClaim(path), socket.socket(socket.AF_UNIX) as running:
        running.bind(str(path))
        with pytest.raises(PlaceError, match=rf"listening there already \(pid {os.getpid()}\)"):
            SocketClaim(path)
        assert path.exists()


def test_socket_of_a_killed_node_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with SocketClaim(path):
        assert not path.exists()
    with SocketClaim(path):
        pass


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    path.write_text("precious")
    for _ in range(2):  # a refused claim must not keep the lock
        with pytest.raises(PlaceError, match="exists and is no socket"):
            SocketClaim(path)
    assert path.read_text() == "precious"
