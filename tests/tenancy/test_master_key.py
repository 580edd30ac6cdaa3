"""The master key: made once, private, and the only way to a namespace's key."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from octavo_server.places import PlaceError
from octavo_server.tenancy.master_key import MASTER_KEY_BYTES, load_master_key, namespace_key


def test_it_is_made_once_and_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "master.key"
    key = load_master_key(path)
    assert len(key) == MASTER_KEY_BYTES
    assert load_master_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["master.key"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_key_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "master.key"
    load_master_key(path)
    path.chmod(mode)
    with pytest.raises(PlaceError, match="chmod 600"):
        load_master_key(path)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_file_of_another_size_is_no_key(tmp_path: Path, size: int) -> None:
    path = tmp_path / "master.key"
    path.write_bytes(b"k" * size)
    path.chmod(0o600)
    with pytest.raises(PlaceError, match=f"has {size} bytes, must have 32"):
        load_master_key(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir(mode=0o700)
    with pytest.raises(PlaceError, match="Is a directory"):
        load_master_key(tmp_path / "key")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaceError, match=r"File exists|Not a directory"):
        load_master_key(tmp_path / "file" / "key")


def test_of_many_that_start_at_once_one_key_wins_for_all(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    start = threading.Barrier(8)
    found: list[bytes] = []

    def load() -> None:
        start.wait()
        found.append(load_master_key(path))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == {path.read_bytes()}


def test_namespace_keys_are_apart_and_reproducible() -> None:
    key = bytes(range(32))
    names = ["default", "default ", "a", "b", "ä", ""]
    keys = {namespace_key(key, name) for name in names}
    assert len(keys) == len(names)
    assert all(len(each) == 32 for each in keys)
    assert namespace_key(key, "default") == namespace_key(key, "default")
    assert namespace_key(bytes(32), "default") not in keys
    # HKDF-SHA256 under the salt "octavo-namespace-1": pages on disk outlive the program.
    assert namespace_key(key, "default").hex() == DEFAULT_OF_COUNTED_KEY


DEFAULT_OF_COUNTED_KEY = "cdcbe7c171562633a5dbdf19d82e901959b4d7855fc66a8c2b3e04cc927d0d03"
