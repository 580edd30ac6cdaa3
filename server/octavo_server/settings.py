"""What a node is told: one frozen value, read once.

Flags win over ``OCTAVO_*`` variables, those over the TOML file, that over the defaults. A
key that nobody knows stops the start; ``settings_sources`` reads the sources and names the
one that is wrong.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from octavo_proto.limits import SEGMENTS_MAX
from octavo_proto.places import default_socket, user_state_directory
from octavo_server.addresses import HostPort, parse_address
from octavo_server.quantities import parse_bytes, parse_seconds

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(le=2**50)]
"""Bounded at a petabyte, so that sums of sizes stay far from 2^63."""

Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, le=86_400)]

PAGE_ALIGN: Final = 4096
"""Slots, slabs and segments are multiples of it: what O_DIRECT and mmap want."""

SOCKET_PATH_BYTES_MAX: Final = 96
"""The kernel takes 107; the broker's socket lies beside it under a longer name."""

_NODE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _default_node_id() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:63] or "octavo"


class Settings(BaseModel):
    """A node's settings. Sizes are bytes, durations seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # Who and where
    node_id: str = Field(default_factory=_default_node_id, description="stable name of the node")
    listen_unix: Path = Field(
        default_factory=default_socket, description="Unix socket for workers of this host"
    )
    listen_tcp: str | None = Field(default=None, description="host:port for gRPC over TCP, or off")
    listen_bulk: str | None = Field(
        default="auto",
        description="host:port for unit bytes over plain TCP, or off; auto: any free port of "
        "listen_tcp's host, off without listen_tcp",
    )
    allow_unauthenticated_tcp: bool = Field(
        default=False, description="serve TCP although there are no credentials yet"
    )
    allow_open_socket_directory: bool = Field(
        default=False, description="serve in a directory that other users can enter"
    )
    http: str | None = Field(
        default="127.0.0.1:9470", description="host:port for /metrics, /healthz, /readyz, or off"
    )
    state_dir: Path | None = Field(
        default=None, description="where the node keeps its master key; default: beside the socket"
    )
    master_key_file: Path | None = Field(
        default=None,
        description="file with the 32-byte master key; default: in the state directory",
    )

    # Memory tier
    memory_bytes: Bytes = Field(default=4 << 30, ge=1 << 20, description="bytes of the arena")
    slab_bytes: Bytes | None = Field(
        default=None,
        ge=PAGE_ALIGN,
        description="bytes given to a size class at a time; default: derived",
    )
    segment_bytes: Bytes | None = Field(
        default=None,
        ge=PAGE_ALIGN,
        description="bytes of one shared-memory segment; default: derived",
    )
    huge_pages: Literal["auto", "off"] = Field(
        default="auto", description="auto: reserved ones or such as the kernel makes; off: never"
    )
    prefault: bool = Field(
        default=False, description="give the whole arena its memory at start, in the background"
    )
    staging_ring_bytes: Bytes = Field(
        default=256 << 20, ge=1 << 16, description="bytes a session may have on their way in"
    )

    pin_share: float = Field(
        default=0.125,
        ge=0,
        le=0.5,
        description="part of the smaller tier that pages pinned by requests may take; 0: no pins",
    )

    # NVMe tier
    nvme_dir: Path | None = Field(
        default=None, description="directory of the NVMe tier; default: none"
    )
    nvme_bytes: Bytes | None = Field(
        default=None, ge=1 << 20, description="bytes of the NVMe tier; needed with nvme_dir"
    )
    nvme_free_space_guard_bytes: Bytes = Field(
        default=1 << 30, description="bytes of the file system that are left free"
    )
    io_threads: int = Field(default=16, ge=1, le=256, description="threads for disk I/O and copies")

    # Leases and sessions
    lease_s: Seconds = Field(default=10.0, description="longest lease")
    hold_s: Seconds = Field(default=30.0, description="longest hold")
    reservation_s: Seconds = Field(default=30.0, description="longest reservation")
    session_idle_s: Seconds = Field(
        default=600.0, description="a session silent for this long is closed"
    )
    sessions_max: int = Field(default=256, ge=1, le=65_536, description="open sessions")
    session_leases_max: int = Field(
        default=1024, ge=1, le=65_536, description="leases of one session"
    )
    session_holds_max: int = Field(default=64, ge=1, le=65_536, description="holds of one session")
    session_reservations_max: int = Field(
        default=64, ge=1, le=65_536, description="reservations of one session"
    )
    drain_s: Seconds = Field(
        default=10.0, description="SIGTERM: time to make durable what is queued"
    )

    # Logs
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="text or json, a line each"
    )

    @field_validator("listen_tcp", "listen_bulk", "http", mode="before")
    @classmethod
    def _off_means_none(cls, value: object) -> object:
        return None if isinstance(value, str) and value.lower() in ("off", "") else value

    @field_validator("listen_tcp", "http")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        return None if value is None else str(parse_address(value))

    @field_validator("listen_bulk")
    @classmethod
    def _is_auto_or_address(cls, value: str | None) -> str | None:
        return value if value in (None, "auto") else str(parse_address(value))

    @field_validator("listen_unix", "state_dir", "master_key_file", "nvme_dir", mode="before")
    @classmethod
    def _is_path(cls, value: object) -> object:
        text = str(value)
        if isinstance(value, str | Path) and (not text.isprintable() or text.strip() != text):
            raise ValueError(f"{text!r} is no path: it has stray characters")
        if text == "":
            raise ValueError("is empty; leave it out to have the default")
        return value

    @field_validator("listen_unix")
    @classmethod
    def _socket_path_fits(cls, value: Path) -> Path:
        path = Path(os.path.expanduser(str(value).removeprefix("unix:"))).absolute()
        if len(str(path).encode()) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"{path} is longer than {SOCKET_PATH_BYTES_MAX} bytes")
        return path

    @field_validator("state_dir", "master_key_file", "nvme_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else Path(os.path.expanduser(value)).absolute()

    @field_validator("node_id")
    @classmethod
    def _plain_node_id(cls, value: str) -> str:
        if _NODE_ID.fullmatch(value) is None:
            raise ValueError(f"{value!r}: allowed are 1 to 63 letters, digits, '.', '_' and '-'")
        return value

    @field_validator("slab_bytes", "segment_bytes", "staging_ring_bytes")
    @classmethod
    def _aligned(cls, value: int | None) -> int | None:
        if value is not None and value % PAGE_ALIGN:
            raise ValueError(f"{value} is no multiple of {PAGE_ALIGN}")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.listen_tcp is not None and not self.allow_unauthenticated_tcp:
            raise ValueError(
                "listen_tcp: there are no credentials yet, so whoever reaches the port could read "
                "and write every page; set allow_unauthenticated_tcp if that is meant"
            )
        if self.bulk_address is not None and not self.allow_unauthenticated_tcp:
            raise ValueError(
                "listen_bulk: unit bytes would cross the network unencrypted; set "
                "allow_unauthenticated_tcp if that is meant"
            )
        if (self.nvme_dir is None) != (self.nvme_bytes is None):
            raise ValueError("nvme_dir and nvme_bytes need each other: set both or neither")
        if self.segment_bytes is not None and self.memory_bytes > SEGMENTS_MAX * self.segment_bytes:
            raise ValueError(
                f"segment_bytes ({self.segment_bytes}): memory_bytes ({self.memory_bytes}) would "
                f"need more than {SEGMENTS_MAX} segments"
            )
        for name in ("slab_bytes", "segment_bytes"):
            value = getattr(self, name)
            if value is not None and value > self.memory_bytes:
                raise ValueError(f"{name} ({value}) is above memory_bytes ({self.memory_bytes})")
        return self

    @property
    def tcp_address(self) -> HostPort | None:
        """Where gRPC listens besides the Unix socket."""
        return None if self.listen_tcp is None else parse_address(self.listen_tcp)

    @property
    def bulk_address(self) -> HostPort | None:
        """Where bulk streams are accepted."""
        if self.listen_bulk != "auto":
            return None if self.listen_bulk is None else parse_address(self.listen_bulk)
        tcp = self.tcp_address
        return None if tcp is None else HostPort(tcp.host, 0)

    @property
    def http_address(self) -> HostPort | None:
        """Where the HTTP port listens."""
        return None if self.http is None else parse_address(self.http)

    @property
    def state_directory(self) -> Path:
        """``state_dir``; else a place that lives as long as the pages do.

        Pages on NVMe outlive a reboot, so the key that names them must too; a node without an
        NVMe tier leaves nothing behind, and its key may lie beside its socket.
        """
        if self.state_dir is not None:
            return self.state_dir
        return self.listen_unix.parent if self.nvme_dir is None else user_state_directory()

    @property
    def master_key_path(self) -> Path:
        """``master_key_file``, else ``master.key`` in the state directory."""
        return self.master_key_file or self.state_directory / "master.key"
