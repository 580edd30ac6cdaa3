"""Connections from a listening socket, one after the other."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from typing import Final

_log = logging.getLogger(__name__)

ACCEPT_PAUSE_S: Final = 0.1
"""After an accept that failed: long enough not to spin, short beside a worker's patience."""


async def accepted(listener: socket.socket, who: str) -> AsyncGenerator[socket.socket]:
    """Each connection that comes, without end. ``who`` comes there, for the log."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            # Out of descriptors, as a rule: that passes when somebody hangs up.
            _log.warning("%s could not be accepted: %s", who, error)
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        yield connection
