"""The node's end of a stream: peers that stall or trickle, and ends in the middle of a transfer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from octavo_server.bulk import channel as channel_module
from octavo_server.bulk.channel import Channel, views_after
from octavo_server.bulk.sending import Sending
from octavo_server.store.io_pool import IoPool

MUCH = 64 << 20
"""More than the kernel's buffers of two sockets take."""


@asynccontextmanager
async def connected() -> AsyncGenerator[tuple[Channel, socket.socket]]:
    io = IoPool(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    channel = Channel(ours, io.lane("bulk", 2))
    try:
        yield channel, peer
    finally:
        peer.close()
        channel.hang_up()
        channel.close()
        assert await io.close(5)


def sending(size_bytes: int = MUCH) -> Sending:
    return Sending([memoryview(bytearray(size_bytes))])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "STALL_S", 0.4)
    monkeypatch.setattr(channel_module, "RATE_MIN", 1 << 40)


def test_a_peer_that_stops_reading_ends_the_transfer() -> None:
    async def story() -> None:
        async with connected() as (channel, _):
            began_s = time.monotonic()
            with pytest.raises(TimeoutError):
                await channel.move_out(sending())
            assert 0.3 < time.monotonic() - began_s < 3

    asyncio.run(story())


def test_a_peer_that_trickles_ends_the_transfer_too() -> None:
    async def story() -> None:
        async with connected() as (channel, peer):
            peer.setblocking(False)
            loop = asyncio.get_running_loop()

            async def trickle() -> None:
                while True:
                    await loop.sock_recv(peer, 100_000)
                    await asyncio.sleep(0.05)

            trickling = asyncio.create_task(trickle())
            began_s = time.monotonic()
            with pytest.raises(TimeoutError):
                await channel.move_out(sending())
            assert time.monotonic() - began_s < 3
            trickling.cancel()

    asyncio.run(story())


def test_half_a_header_is_not_waited_for_for_ever() -> None:
    async def story() -> None:
        async with connected() as (channel, peer):
            peer.sendall(b"half")
            with pytest.raises(TimeoutError):
                await channel.read(8, first_byte_s=None)

    asyncio.run(story())


def test_silence_between_requests_is_no_fault() -> None:
    async def story() -> None:
        async with connected() as (channel, peer):
            asyncio.get_running_loop().call_later(1.0, peer.sendall, b"whole")
            assert await channel.read(5, first_byte_s=None) == b"whole"

    asyncio.run(story())


def test_hanging_up_ends_a_transfer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "STALL_S", 30.0)

    async def story() -> None:
        async with connected() as (channel, _):
            asyncio.get_running_loop().call_later(0.3, channel.hang_up)
            began_s = time.monotonic()
            with pytest.raises(OSError, match=r"[Pp]ipe|reset"):
                await channel.move_out(sending())
            assert time.monotonic() - began_s < 2

    asyncio.run(story())


def test_a_cancelled_transfer_ends_only_when_no_thread_is_in_it() -> None:
    class Slow(Sending):
        ended = False

        def step(self, connection: socket.socket) -> bool:
            time.sleep(0.3)
            self.ended = True
            return True

    async def story() -> None:
        async with connected() as (channel, _):
            slow = Slow([])
            task = asyncio.create_task(channel.move_out(slow))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert slow.ended

    asyncio.run(story())


def test_views_after_some_bytes_are_what_is_left() -> None:
    views = [memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")]

    def left(done_bytes: int) -> list[bytes]:
        return [bytes(view) for view in views_after(views, done_bytes)]

    assert left(0) == [b"abc", b"de", b"f"]
    assert left(2) == [b"c", b"de", b"f"]
    assert left(3) == [b"de", b"f"]
    assert left(6) == []
