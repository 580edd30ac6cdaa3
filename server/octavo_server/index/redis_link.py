"""Script calls to Redis, whatever its form: deadlines, unknown scripts, errors by name.

One server, or Sentinel's master, gets the shards of a call in one command. A cluster gets one
command a shard, those for the same server in one pipeline; a server that is away costs its
own shards only.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis import exceptions

from octavo_server.addresses import HostPort
from octavo_server.index.backoff import Backoff
from octavo_server.index.errors import IndexUnavailable, Trouble
from octavo_server.index.redis_clients import make_client
from octavo_server.index.redis_settings import Form, RedisSettings
from octavo_server.index.scripts import Script

_BY_TYPE: Final[tuple[tuple[type[Exception], Trouble], ...]] = (
    (exceptions.BusyLoadingError, Trouble.LOADING),
    (exceptions.AuthenticationError, Trouble.DENIED),
    (exceptions.AuthorizationError, Trouble.DENIED),
    (exceptions.NoPermissionError, Trouble.DENIED),
    (exceptions.ReadOnlyError, Trouble.READ_ONLY),
    (exceptions.OutOfMemoryError, Trouble.FULL),
    (exceptions.MovedError, Trouble.MOVED),
    (exceptions.AskError, Trouble.MOVED),
    (exceptions.TryAgainError, Trouble.MOVED),
    (exceptions.ClusterDownError, Trouble.MOVED),
    (exceptions.RedisClusterException, Trouble.MOVED),
    (exceptions.TimeoutError, Trouble.TIMEOUT),
    (TimeoutError, Trouble.TIMEOUT),
    (exceptions.ConnectionError, Trouble.CONNECTION),
    (OSError, Trouble.CONNECTION),
)
# Redis before 7 puts the error of a command in a script behind words of its own.
_BY_WORD: Final = {
    "OOM": Trouble.FULL,
    "READONLY": Trouble.READ_ONLY,
    "MISCONF": Trouble.READ_ONLY,
    "NOREPLICAS": Trouble.READ_ONLY,
    "LOADING": Trouble.LOADING,
    "MASTERDOWN": Trouble.CONNECTION,
    "CLUSTERDOWN": Trouble.MOVED,
    "NOAUTH": Trouble.DENIED,
    "NOPERM": Trouble.DENIED,
}
_WORD: Final = re.compile(rf"\b({'|'.join(_BY_WORD)})\b")

_FAILURES: Final = (OSError, exceptions.RedisError, exceptions.RedisClusterException)
"""All that redis-py raises for what goes wrong on the way. The last is none of its own errors: a
cluster of which no server answers."""

RELEARN_S: Final = 1.0
"""A cluster's shape is asked for again after an error, and no more often than this."""

_ANSWERS: Final = (Trouble.FULL, Trouble.READ_ONLY, Trouble.REFUSED)
"""The server is well enough to say no: others may ask it."""


def trouble_of(error: Exception) -> Trouble:
    """The name of what went wrong."""
    for kind, trouble in _BY_TYPE:
        if isinstance(error, kind):
            return trouble
    found = _WORD.search(str(error))
    return _BY_WORD[found[1]] if found else Trouble.REFUSED


@dataclass(frozen=True, slots=True)
class ShardCall:
    """A part of a call: a shard's state and what the script shall do there."""

    key: str
    argument: bytes


class RedisLink:
    """Calls to one Redis on behalf of one event loop; at most ``calls_max`` at a time."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings: Final = settings
        self.troubles: Final[Counter[Trouble]] = Counter()
        """How often each has happened."""
        self._client: Any = make_client(settings)
        self._slots = asyncio.Semaphore(settings.calls_max)
        self._backoffs: dict[str, Backoff] = {}
        self._topology: asyncio.Task[None] | None = None
        self._learnt_s = float("-inf")
        self._closing: dict[asyncio.Task[None], Any] = {}
        self._is_cluster = settings.form is Form.CLUSTER

    async def call(
        self, script: Script, keys: Sequence[str], arguments: Sequence[bytes], timeout_s: float
    ) -> Any:
        """The script's answer. All keys lie in one slot.

        Raises:
            IndexUnavailable: there is none, within ``timeout_s``.
        """
        command = (len(keys), *keys, *arguments)
        name = ""
        try:
            async with asyncio.timeout(timeout_s):
                name = await self._server_of(keys[0])
                (answer,) = await self._ask(name, script, [command])
        except IndexUnavailable as error:
            answer = error.trouble
        except _FAILURES as error:
            answer = self._troubled(name, error)
        if isinstance(answer, Trouble):
            raise IndexUnavailable(answer)
        return answer

    async def call_shards(
        self, script: Script, head: Sequence[bytes], calls: Sequence[ShardCall], timeout_s: float
    ) -> list[Any]:
        """The script's answer for each shard, or the ``Trouble`` that it had there.

        ``head`` goes before the shards' own arguments.
        """
        answers: list[Any] = [Trouble.TIMEOUT] * len(calls)
        groups: dict[str, list[int]] = {}
        try:
            async with asyncio.timeout(timeout_s):
                for row, each in enumerate(calls):
                    groups.setdefault(await self._server_of(each.key), []).append(row)
        except IndexUnavailable as error:
            return [error.trouble] * len(calls)
        except _FAILURES as error:
            return [self._troubled("", error)] * len(calls)

        async def ask(name: str, rows: list[int]) -> None:
            parts = [[row] for row in rows] if self._is_cluster else [rows]
            commands = [
                (
                    len(part),
                    *(calls[row].key for row in part),
                    *head,
                    *(calls[row].argument for row in part),
                )
                for part in parts
            ]
            found: list[Any]
            try:
                async with asyncio.timeout(timeout_s):
                    found = await self._ask(name, script, commands)
            except TimeoutError as error:
                found = [self._troubled(name, error)] * len(parts)
            for part, answer in zip(parts, found, strict=True):
                for at, row in enumerate(part):
                    answers[row] = answer if isinstance(answer, Trouble) else answer[at]

        await asyncio.gather(*(ask(name, rows) for name, rows in groups.items()))
        return answers

    async def close(self) -> None:
        """Closes all connections."""
        clients = [self._client, *self._closing.values()]
        tasks = [*self._closing, *([self._topology] if self._topology else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.aclose() for client in clients))

    async def _server_of(self, key: str) -> str:
        """The name of the server that has a key; empty where there is but one."""
        if not self._is_cluster:
            return ""
        if self._topology is None:
            if not self._backoff("").may_ask():
                raise IndexUnavailable(Trouble.BACKING_OFF)
            # A task of its own: it may take longer than the deadline of whoever asks first.
            self._topology = asyncio.create_task(self._learn_topology())
        if not self._topology.done():
            await asyncio.shield(self._topology)
        if (error := self._topology.exception()) is not None:
            self._topology = None
            raise error
        node: Any = self._client.get_node_from_key(key)
        if node is None:
            raise exceptions.ClusterDownError(f"no server has the slot of {key}")
        return str(node.name)

    @property
    def _topology_is_learnt(self) -> bool:
        return self._topology is not None and self._topology.done()

    async def _learn_topology(self) -> None:
        """A new client takes over. Calls in progress end on the old one before it is closed."""
        old = self._client
        also = [HostPort(str(node.host), int(node.port)) for node in old.get_nodes()]
        new = make_client(self.settings, also)
        try:
            await new.initialize()
        except BaseException as error:
            await new.aclose()
            was_learnt = self._learnt_s > float("-inf")
            if was_learnt and isinstance(error, _FAILURES):
                # redis-py can't begin while its first server is away; what was known still helps.
                self._learnt_s = time.monotonic()
                self.troubles[trouble_of(error)] += 1
                return
            raise
        self._client = new
        self._learnt_s = time.monotonic()
        self._backoff("").succeeded()
        closing = asyncio.create_task(self._close_later(old))
        self._closing[closing] = old
        closing.add_done_callback(self._closing.pop)

    async def _close_later(self, client: Any) -> None:
        await asyncio.sleep(self.settings.write_timeout_s)
        await client.aclose()

    def _backoff(self, name: str) -> Backoff:
        return self._backoffs.setdefault(name, Backoff())

    async def _ask(self, name: str, script: Script, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Raises TimeoutError, and nothing else."""
        backoff = self._backoff(name)
        if not backoff.may_ask():
            return [Trouble.BACKING_OFF] * len(commands)
        async with self._slots:
            try:
                found = await self._send("EVALSHA", script.sha1, commands)
                unknown = [
                    row
                    for row, each in enumerate(found)
                    if isinstance(each, exceptions.NoScriptError)
                ]
                if unknown:
                    repeated = [commands[row] for row in unknown]
                    again = await self._send("EVAL", script.text, repeated)
                    for row, each in zip(unknown, again, strict=True):
                        found[row] = each
            except _FAILURES as error:
                return [self._troubled(name, error)] * len(commands)
        return self._named(name, backoff, found)

    def _named(self, name: str, backoff: Backoff, found: list[Any]) -> list[Any]:
        """The answers with errors named; the worst of them decides who may ask next."""
        troubles = {
            row: trouble_of(each) for row, each in enumerate(found) if isinstance(each, Exception)
        }
        silent = [row for row, each in troubles.items() if each not in _ANSWERS]
        if silent:
            self._troubled(name, found[silent[0]])
        else:
            backoff.succeeded()
            self.troubles.update(set(troubles.values()))
        return [troubles.get(row, each) for row, each in enumerate(found)]

    async def _send(self, verb: str, what: str, commands: list[tuple[Any, ...]]) -> list[Any]:
        """An answer or the server's error for each command."""
        if self._is_cluster:
            pipeline = self._client.pipeline()
            for command in commands:
                pipeline.execute_command(verb, what, *command)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            return answers
        (command,) = commands
        try:
            return [await self._client.execute_command(verb, what, *command)]
        except exceptions.ResponseError as error:
            return [error]

    def _troubled(self, name: str, error: Exception) -> Trouble:
        """Counts it, and keeps others from asking at once."""
        trouble = trouble_of(error)
        self.troubles[trouble] += 1
        if trouble not in _ANSWERS:
            self._backoff(name).failed()
            aged_s = time.monotonic() - self._learnt_s
            if trouble is not Trouble.DENIED and aged_s > RELEARN_S and self._topology_is_learnt:
                self._topology = None
        return trouble
