"""How to reach Redis or Valkey: one frozen value, and the address it can be read from.

    redis://[user:password@]host:port[/database]            one server; unix:///path[?db=0]
    redis+sentinel://[...]host:port,host:port/service[/database]
    redis+cluster://[...]host:port,host:port

``rediss`` in place of ``redis`` means TLS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from octavo_server.addresses import HostPort, parse_address
from octavo_server.index.errors import IndexSettingsError

_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379


class Form(Enum):
    """What kind of Redis it is. The values are what stands behind ``redis`` in an address."""

    SINGLE = ""
    SENTINEL = "+sentinel"
    CLUSTER = "+cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM. Without ``ca_file`` the system's authorities are trusted."""

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    check_host_name: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Raises ``IndexSettingsError`` where the values contradict each other."""

    form: Form = Form.SINGLE
    addresses: tuple[HostPort, ...] = ()
    socket_path: Path | None = None
    service: str | None = None
    """What Sentinel calls the servers it watches."""
    database: int = 0
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    tls: Tls | None = None
    prefix: str = "octavo"
    """First part of every key. Clusters of nodes with different prefixes can share a Redis."""
    match_timeout_s: float = 0.25
    """A match that takes longer is a miss."""
    write_timeout_s: float = 2.0
    """For changes, sweeps and the registry."""
    calls_max: int = 16
    """Calls in progress, each on a connection of its own; further ones wait their turn."""

    def __post_init__(self) -> None:
        if (self.socket_path is None) == (not self.addresses):
            raise IndexSettingsError("addresses: give host and port, or a Unix socket")
        if self.socket_path is not None and self.form is not Form.SINGLE:
            raise IndexSettingsError("socket_path: Sentinel and Cluster are reached over TCP")
        if self.form is Form.SINGLE and len(self.addresses) > 1:
            raise IndexSettingsError("addresses: one server has one; or is it Sentinel or Cluster?")
        if (self.service is None) == (self.form is Form.SENTINEL):
            raise IndexSettingsError("service: the name of what Sentinel watches, and only there")
        if self.form is Form.CLUSTER and self.database:
            raise IndexSettingsError("database: a cluster has only database 0")
        if not _PREFIX.fullmatch(self.prefix):
            raise IndexSettingsError(
                f"prefix {self.prefix!r}: 1 to 32 letters, digits, dots, dashes or underscores"
            )
        for name in ("match_timeout_s", "write_timeout_s", "calls_max"):
            if getattr(self, name) <= 0:
                raise IndexSettingsError(f"{name} {getattr(self, name)}: must be above 0")


def parse_redis_address(text: str) -> RedisSettings:
    """The settings that an address names, all others at their defaults.

    Raises:
        IndexSettingsError: it cannot be read. The message leaves out the password.
    """
    parts = urlsplit(text)
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    if parts.scheme == "unix":
        database = _database(parse_qs(parts.query).get("db", ["0"])[0])
        return RedisSettings(
            socket_path=Path(parts.path), database=database, username=user, password=password
        )
    scheme = re.fullmatch(r"redis(s?)((?:\+[a-z]+)?)", parts.scheme)
    if scheme is None or scheme[2] not in {form.value for form in Form}:
        raise IndexSettingsError(
            f"address: {parts.scheme or 'nothing'} before ://, must be redis, rediss, unix, "
            "redis+sentinel, rediss+sentinel, redis+cluster or rediss+cluster"
        )
    form = Form(scheme[2])
    port = _SENTINEL_PORT if form is Form.SENTINEL else _PORT
    hosts = parts.netloc.rpartition("@")[2].split(",")
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = path.pop(0) if form is Form.SENTINEL and path else None
    database = _database(path.pop(0)) if path else 0
    if path:
        raise IndexSettingsError(f"address: {'/'.join(path)!r} at the end means nothing")
    settings = RedisSettings(
        form=form,
        addresses=tuple(_host(host, port) for host in hosts),
        service=service,
        database=database,
        username=user,
        password=password,
    )
    return replace(settings, tls=Tls()) if scheme[1] else settings


def _host(text: str, port: int) -> HostPort:
    has_port = re.search(r":\d+$", text) is not None
    try:
        return parse_address(text if has_port else f"{text}:{port}")
    except ValueError as error:
        raise IndexSettingsError(f"address: {error}") from None


def _database(text: str) -> int:
    if not text.isdecimal():
        raise IndexSettingsError(f"address: {text!r} is no number of a database")
    return int(text)
