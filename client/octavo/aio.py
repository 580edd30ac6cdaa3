"""The asyncio face: every method of ``Client`` as a coroutine, over the same core.

Calls run on a small pool of threads, since most of a get is copying, which would block an event
loop anyway. Cancelling the task cancels its gRPC calls; the coroutine then ends when the thread
has let go of the caller's buffers, at most one slice of copying later.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from octavo.chain import Chain, ForeignChain
from octavo.client import TIMEOUT_S, Client
from octavo.deadline import CallScope, current_scope
from octavo.errors import CallCancelled
from octavo.health import Health
from octavo.results import Hold, NodeInfo
from octavo.terms import TransportChoice
from octavo_proto.layout import Layout

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

THREADS: Final = 8
"""Calls that run at once; further ones wait without a thread, their deadlines running."""


def _coroutine(
    method: Callable[Concatenate[Client, Parameters], Answer],
) -> Callable[Concatenate[AsyncClient, Parameters], Coroutine[Any, Any, Answer]]:
    """The coroutine method that runs ``method`` of the core on a thread."""

    async def call(
        self: AsyncClient, /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Answer:
        return await self.run(lambda: method(self.core, *args, **kwargs))

    call.__name__ = method.__name__
    call.__doc__ = method.__doc__
    return call


class AsyncClient:
    """``Client`` for asyncio. Arguments and answers are the same."""

    def __init__(
        self,
        address: str | None = None,
        *,
        layouts: Sequence[Layout],
        namespaces: Sequence[str] = ("default",),
        transport: TransportChoice = "auto",
        timeout_s: float = TIMEOUT_S,
        variants: Sequence[int] = (),
        profile: str = "exact",
        profiles: Mapping[str, str] | None = None,
    ) -> None:
        self.core: Final = Client(
            address,
            layouts=layouts,
            namespaces=namespaces,
            transport=transport,
            timeout_s=timeout_s,
            variants=variants,
            profile=profile,
            profiles=profiles,
        )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="octavo")
        self._slots = asyncio.Semaphore(THREADS)

    connect = _coroutine(Client.connect)
    match = _coroutine(Client.match)
    get = _coroutine(Client.get)
    put = _coroutine(Client.put)
    retain = _coroutine(Client.retain)
    hint = _coroutine(Client.hint)
    delete = _coroutine(Client.delete)
    clear = _coroutine(Client.clear)
    flush = _coroutine(Client.flush)
    statistics = _coroutine(Client.statistics)

    async def release(self, hold: Hold) -> bool:
        """Ends a hold; whether it had held until now."""
        return await self.run(hold.release)

    def chain(
        self,
        token_ids: Iterable[int] = (),
        layout: str | None = None,
        namespace: str | None = None,
    ) -> Chain:
        """As ``Client.chain``. Hashing happens on a thread, in the call that needs the keys."""
        return self.core.chain(token_ids, layout, namespace)

    def foreign_chain(
        self, keys: Sequence[bytes], layout: str | None = None, namespace: str | None = None
    ) -> ForeignChain:
        """As ``Client.foreign_chain``."""
        return self.core.foreign_chain(keys, layout, namespace)

    @property
    def node(self) -> NodeInfo | None:
        return self.core.node

    @property
    def transport_name(self) -> str | None:
        return self.core.transport_name

    @property
    def health(self) -> Health:
        return self.core.health

    async def close(self) -> None:
        """Ends the session. Calls in progress end with it."""
        await asyncio.get_running_loop().run_in_executor(None, self.core.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """Runs ``work`` on a thread, in a scope that dies with this task's call."""
        scope = CallScope()
        context = contextvars.copy_context()
        context.run(current_scope.set, scope)
        async with self._slots:
            running = asyncio.get_running_loop().run_in_executor(self._threads, context.run, work)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                scope.cancel()
                await _ended(running)
                raise


async def _ended(running: asyncio.Future[Answer]) -> None:
    """Waits until the thread is done with the caller's buffers, also if cancelled again."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        error = running.exception()
        if error is not None and not isinstance(error, CallCancelled):
            # It failed by itself at the same moment; the task asked for no answer any more.
            return
