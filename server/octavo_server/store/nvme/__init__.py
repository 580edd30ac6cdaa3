"""The NVMe tier: unit bodies in one sparse file, and a metadata log that says what they are."""

from octavo_server.store.nvme.config import NvmeConfig, StoreError
from octavo_server.store.nvme.health import Room
from octavo_server.store.nvme.records import NO_OFFSET, RECORD, Kind
from octavo_server.store.nvme.store import NvmeStore
from octavo_server.store.nvme.transfers import BodyToRead, UnitOutcome

__all__ = [
    "NO_OFFSET",
    "RECORD",
    "BodyToRead",
    "Kind",
    "NvmeConfig",
    "NvmeStore",
    "Room",
    "StoreError",
    "UnitOutcome",
]
