"""``host:port`` texts."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})")
PORT_MAX: Final = 65_535


class HostPort(NamedTuple):
    """A host name or IP address (without brackets) and a port; port 0 means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> HostPort:
    """``127.0.0.1:9470``, ``node-3.rack:9470`` or ``[::1]:9470``.

    Raises:
        ValueError: anything else, stray characters and spaces included.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is no address; allowed: host:port, e.g. 127.0.0.1:9470 or [::1]:9470"
        )
    host, port = found[1] or found[2], int(found[3])
    if port > PORT_MAX:
        raise ValueError(f"{text!r} has port {port}, allowed: 0 to {PORT_MAX}")
    return HostPort(host, port)
