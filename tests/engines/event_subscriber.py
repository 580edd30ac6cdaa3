"""A router's ear: what an engine publishes of its KV blocks, over ZeroMQ."""

from __future__ import annotations

import importlib
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

# By name, for the type checkers work where these are not: they come with vLLM.
zmq: Any = importlib.import_module("zmq")
msgspec: Any = importlib.import_module("msgspec")

DEVICE: Final = "GPU"
"""vLLM's word for the engine's own blocks, on a CPU too."""

NODE: Final = "CPU"
"""And for those that lie in a host's memory: the node's."""


@dataclass(frozen=True)
class BlockEvent:
    """Blocks that are stored somewhere, or no longer are."""

    stored: bool
    medium: str
    hashes: tuple[Any, ...]
    parent: Any = None
    token_ids: tuple[int, ...] = ()
    block_tokens: int = 0


class EventSubscriber(AbstractContextManager["EventSubscriber"]):
    """Listens from the start on, so that it misses nothing of an engine started later."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-test-")
        self._endpoint = f"ipc://{self._folder.name}/events"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(self._endpoint)
        self._socket.subscribe(b"")
        self.events: list[BlockEvent] = []

    @property
    def config(self) -> dict[str, object]:
        """vLLM's ``kv_events_config``."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint,
        }

    def hashes(self, medium: str, *, stored: bool) -> list[Any]:
        """Of all blocks so far, in the order of the events."""
        self._receive()
        chosen = (e for e in self.events if e.medium == medium and e.stored is stored)
        return [each for event in chosen for each in event.hashes]

    def forget(self) -> None:
        """Drops what has come so far."""
        self._receive()
        self.events.clear()

    def _receive(self, quiet_s: float = 0.5) -> None:
        """Takes all that comes until nothing has for a while."""
        while self._socket.poll(quiet_s * 1000):
            _topic, _sequence, payload = self._socket.recv_multipart()
            _time, events, *_rank = msgspec.msgpack.decode(payload)
            self.events += [_event(each) for each in events if each["type"] in _KINDS]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close(linger=0)
        self._folder.cleanup()


_KINDS: Final = ("BlockStored", "BlockRemoved")


def _event(message: dict[str, Any]) -> BlockEvent:
    return BlockEvent(
        stored=message["type"] == "BlockStored",
        medium=message["medium"],
        hashes=tuple(message["block_hashes"]),
        parent=message.get("parent_block_hash"),
        token_ids=tuple(message.get("token_ids", ())),
        block_tokens=message.get("block_size", 0),
    )
