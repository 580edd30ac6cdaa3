"""Which gRPC status each error becomes. The one table."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar

import grpc

from octavo_proto.columns import ColumnError
from octavo_proto.layout import LayoutError
from octavo_server.errors import (
    LimitReached,
    RequestError,
    SessionRefusedError,
    SessionUnknown,
    Unavailable,
)

_log = logging.getLogger(__name__)

CODES: Final[dict[type[Exception], grpc.StatusCode]] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ColumnError: grpc.StatusCode.INVALID_ARGUMENT,
    LayoutError: grpc.StatusCode.INVALID_ARGUMENT,
    SessionUnknown: grpc.StatusCode.UNAUTHENTICATED,
    SessionRefusedError: grpc.StatusCode.FAILED_PRECONDITION,
    LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}

Refused = Callable[[], None]
Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


async def answered(context: Context, refused: Refused, work: Awaitable[Answer]) -> Answer:
    """Result of ``work``; an error of ours becomes its status and message."""
    try:
        return await work
    except tuple(CODES) as error:
        refused()
        await context.abort(CODES[type(error)], str(error))
    except OSError as error:
        _log.warning("a request failed: %s", error)
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    raise AssertionError("abort raises")


async def streamed(
    context: Context, refused: Refused, items: AsyncGenerator[Answer]
) -> AsyncGenerator[Answer]:
    """As ``answered``, for a stream. What ``items`` hold ends with the stream, however it ends."""
    async with aclosing(items):
        while True:
            try:
                item = await answered(context, refused, anext(items))
            except StopAsyncIteration:
                return
            yield item
