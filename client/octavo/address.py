"""Where a node listens."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from octavo.errors import InvalidRequest
from octavo_proto.places import ADDRESS_VARIABLE, default_socket

SOCKET_PATH_BYTES_MAX: Final = 107
"""Linux keeps 108 bytes for a Unix socket's path, the closing zero included."""

_HOST_PORT: Final = re.compile(
    r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?):(\d{1,5})"
)


@dataclass(frozen=True, slots=True)
class Address:
    """``target`` is what gRPC dials; ``is_local`` means a Unix socket, thus this host."""

    target: str
    is_local: bool

    def __str__(self) -> str:
        return self.target

    @property
    def host(self) -> str:
        """The node's host, for other ports of it; a Unix socket's is this one."""
        return "127.0.0.1" if self.is_local else self.target.rpartition(":")[0].strip("[]")


def parse_address(text: str) -> Address:
    """``unix:/path/to/socket`` or ``host:port``.

    Raises:
        InvalidRequest: neither; the message says what is wrong.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path.removeprefix("//")
        if not path.startswith("/"):
            raise InvalidRequest(f"address {text!r}: the path of a Unix socket must be absolute")
        if any(ord(character) < 32 for character in path):
            raise InvalidRequest(f"address {text!r} has control characters")
        if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
            raise InvalidRequest(
                f"address {text!r}: path longer than {SOCKET_PATH_BYTES_MAX} bytes"
            )
        return Address(f"unix:{path}", is_local=True)
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"address {text!r} is neither unix:/path nor host:port")
    if not 0 < int(match[2]) < 65536:
        raise InvalidRequest(f"address {text!r}: the port must be 1 to 65535")
    return Address(text, is_local=False)


def default_address(environment: Mapping[str, str] = os.environ) -> str:
    """``$OCTAVO_ADDRESS``, else the socket where a node of this user listens by default."""
    configured = environment.get(ADDRESS_VARIABLE)
    if configured:
        return configured
    return f"unix:{default_socket(environment)}"
