"""How long a restart takes when a million units lie on NVMe.

A child process opens a real store and logs a million units in chains, as the node would, but
leaves their bodies sparse; then it is killed with SIGKILL and the page cache is dropped. The
time is that of a node from exec until it opens sessions, and a chain must be found afterwards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from octavo.client import Client
from octavo.local_node import LocalNode
from octavo_proto.columns import read_keys
from octavo_proto.keys import page_keys
from octavo_proto.layout import Layout

if TYPE_CHECKING:
    from octavo_server.store.nvme.records import Records

CHAIN_PAGES: Final = 100
CHAINS: Final = 10_000
LAYOUT: Final = Layout(
    name="bench-recovery", model="bench", layers=1, kv_heads=1, head_dim=64, dtype="uint8"
)
NVME_BYTES: Final = 8 << 30
SLAB_BYTES: Final = 16 << 20
_READY: Final = "ready"


def recover_seconds(place: Path) -> float:
    """See above. Needs ``octavo_server``.

    Raises:
        RuntimeError: something is missing after the restart.
    """
    nvme, state = place / "nvme", place / "state"
    state.mkdir()
    _log_units(nvme, state)
    _drop_page_cache(nvme)
    with LocalNode(
        memory_bytes="1GiB",
        slab_bytes=SLAB_BYTES,
        nvme_dir=nvme,
        nvme_bytes=NVME_BYTES,
        state_dir=state,
    ) as node:
        taken_s = node.start()
        with Client(node.address, layouts=[LAYOUT]) as client:
            found = client.match(client.chain(_tokens(CHAINS - 1))).page_count
            pages = next(
                tier.page_count for tier in client.statistics().tiers if tier.tier == "nvme"
            )
    if found != CHAIN_PAGES or pages != CHAINS * CHAIN_PAGES:
        raise RuntimeError(f"after the restart: {pages} pages, {found} of a chain")
    return taken_s


def _log_units(nvme: Path, state: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "octavo.bench.recovery", str(nvme), str(state)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    said = child.stdout.readline().strip()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    if said != _READY:
        raise RuntimeError("the process that logs units failed")


async def _write(nvme: Path, state: Path) -> None:
    """Logs the units; runs in the child."""
    from octavo_server.store.io_pool import IoPool
    from octavo_server.store.nvme.config import NvmeConfig
    from octavo_server.store.nvme.store import NvmeStore
    from octavo_server.tenancy.master_key import load_master_key, namespace_key

    config = NvmeConfig(directory=nvme, capacity_bytes=NVME_BYTES, slab_bytes=SLAB_BYTES)
    store = await NvmeStore.open(config, IoPool())
    namespace = await store.register_namespace("default")
    layout = await store.register_layout(namespace, LAYOUT)
    key = namespace_key(load_master_key(state / "master.key"), "default")
    fingerprint = LAYOUT.fingerprint()
    for chain in range(CHAINS):
        keys = read_keys("keys", page_keys(key, fingerprint, 16, _tokens(chain)), CHAIN_PAGES)
        records = _records(namespace, layout, keys)
        records["offset"] = store.allocate(records["length"])
        if not await store.log_units(records):
            raise RuntimeError("the log did not take a batch")
    print(_READY, flush=True)
    await asyncio.sleep(60)


def _records(
    namespace: int, layout: int, keys: np.ndarray[tuple[int, int], np.dtype[np.uint64]]
) -> Records:
    from octavo_server.store.nvme.records import RECORD, Kind

    records = np.zeros(len(keys), dtype=RECORD)
    records["kind"] = Kind.PUT
    records["unit_count"] = 1
    records["variant"] = 1
    records["namespace"] = namespace
    records["layout"] = layout
    records["position"] = np.arange(len(keys))
    records["key"] = keys
    records["parent"][1:] = keys[:-1]
    records["length"] = LAYOUT.raw_page_bytes
    return records


def _tokens(chain: int) -> range:
    first = chain * CHAIN_PAGES * LAYOUT.page_tokens
    return range(first, first + CHAIN_PAGES * LAYOUT.page_tokens)


def _drop_page_cache(directory: Path) -> None:
    """Everything where we may, else the store's own files."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    asyncio.run(_write(Path(sys.argv[1]), Path(sys.argv[2])))
