"""Directories that can't be opened: refused in words, and let go of."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.faulty_files import FaultyFiles, always
from tests.store.nvme_bench import CAPACITY_BYTES, SLAB_BYTES, opened

from octavo_server.store.nvme import StoreError


def test_a_second_node_on_the_directory_is_refused_by_name(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            with pytest.raises(StoreError, match=rf"nvme is in use by process {os.getpid()}"):
                async with opened(tmp_path / "nvme"):
                    pass
            _, stored = await bench.put([1])
            assert stored.all()
        async with opened(tmp_path / "nvme"):
            pass

    asyncio.run(run())


def _make_foreign(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").touch()


def _make_file(directory: Path) -> None:
    directory.touch()


def _make_unreadable(directory: Path) -> None:
    directory.mkdir()
    (directory / "store.json").write_text('{"format": 1, "store')


def _make_newer(directory: Path) -> None:
    directory.mkdir()
    (directory / "store.json").write_text('{"format": 2}')


def _make_nameless(directory: Path) -> None:
    directory.mkdir()
    (directory / "store.json").write_text('{"format": 1, "store_id": 5}')


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_make_foreign, "thesis.tex"),
        (_make_file, "can't be used"),
        (_make_unreadable, "store.json is damaged"),
        (_make_newer, "format 2"),
        (_make_nameless, "no store id and slabs"),
    ],
)
def test_a_directory_that_is_no_store_is_refused_in_words(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    make(tmp_path / "nvme")

    async def run() -> None:
        with pytest.raises(StoreError, match=words):
            async with opened(tmp_path / "nvme"):
                pass

    asyncio.run(run())


def test_a_damaged_registry_is_refused_in_words(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme"):
            pass
        registry = tmp_path / "nvme" / "registry.json"
        whole = registry.read_text()
        for damaged in (whole[: len(whole) // 2], "[]", '{"format": 1}', whole.replace("tiny", "")):
            registry.write_text(damaged)
            with pytest.raises(StoreError, match=r"registry\.json"):
                async with opened(tmp_path / "nvme"):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize("call", ["open", "preadv", "truncate", "fdatasync"])
def test_a_device_that_fails_at_the_start_is_refused_and_let_go_of(
    tmp_path: Path, call: str
) -> None:
    files = FaultyFiles()
    files.faults[call] = always(errno.EROFS)

    async def run() -> None:
        with pytest.raises(StoreError, match=r"nvme can't be used.*[Rr]ead-only"):
            async with opened(tmp_path / "nvme", files):
                pass
        async with opened(tmp_path / "nvme"):
            pass

    asyncio.run(run())


def test_a_capacity_below_one_slab_is_refused_with_the_figures(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(StoreError, match=f"{SLAB_BYTES - 1} bytes.*{SLAB_BYTES}"):
            async with opened(tmp_path / "nvme", capacity_bytes=SLAB_BYTES - 1):
                pass
        assert not (tmp_path / "nvme").exists()
        async with opened(tmp_path / "nvme", capacity_bytes=CAPACITY_BYTES):
            pass

    asyncio.run(run())
