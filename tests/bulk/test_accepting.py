"""Taking connections: one that could not be taken is not the end of all others."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import pytest

from octavo_server.accepting import accepted


def test_after_an_accept_that_failed_the_next_connection_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, 2

        async def out_of_descriptors(listener: socket.socket) -> tuple[socket.socket, object]:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", out_of_descriptors)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            with socket.create_connection(listener.getsockname()) as peer:
                connections = accepted(listener, "a worker")
                async with asyncio.timeout(5):
                    connection = await anext(connections)
                assert connection.getpeername() == peer.getsockname()
                connection.close()
                await connections.aclose()
        assert failures == 0

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["a worker could not be accepted: [Errno 24] Too many open files"] * 2
