"""Requests that are no messages at all are refused like other bad input, on every service.

gRPC answers bytes that it can't decode with UNKNOWN and a stack trace in the log. Here they are
INVALID_ARGUMENT, with a message, and cost the log nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError

from octavo_server.rpc.status import Context

Behavior = Callable[[Any, Context], Any]


class CheckedServer:
    """Where generated code registers its methods: each is wrapped, then goes to the real server."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server: Final = server

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler]) -> None:
        """Generated code calls this and the next one with the same methods: once is enough."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Registers a service's methods."""
        checked = {name: _checked(service, name, handler) for name, handler in handlers.items()}
        generic = grpc.method_handlers_generic_handler(service, checked)
        self._server.add_generic_rpc_handlers((generic,))


def checked_server(server: grpc.aio.Server) -> grpc.aio.Server:
    """What to hand to ``add_…Servicer_to_server`` in the server's place."""
    return cast("grpc.aio.Server", CheckedServer(server))


def _checked(
    service: str, name: str, handler: grpc.RpcMethodHandler[Any, Any]
) -> grpc.RpcMethodHandler[Any, Any]:
    decode, encode = handler.request_deserializer, handler.response_serializer
    reason = f"this is no request of {service}/{name}: its bytes can't be decoded"

    def decode_or_none(data: bytes) -> Any:
        try:
            return decode(data) if decode is not None else data
        except DecodeError:
            return None

    if handler.request_streaming:

        async def checked_stream(requests: AsyncIterator[Any], context: Context) -> Any:
            async for request in requests:
                if request is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
                yield request

        if handler.response_streaming:
            serve_both = cast("Behavior", handler.stream_stream)

            async def stream_stream(requests: AsyncIterator[Any], context: Context) -> Any:
                async with aclosing(
                    serve_both(checked_stream(requests, context), context)
                ) as items:
                    async for response in items:
                        yield response

            return grpc.stream_stream_rpc_method_handler(stream_stream, decode_or_none, encode)
        serve_requests = cast("Behavior", handler.stream_unary)

        async def stream_unary(requests: AsyncIterator[Any], context: Context) -> Any:
            return await serve_requests(checked_stream(requests, context), context)

        return grpc.stream_unary_rpc_method_handler(stream_unary, decode_or_none, encode)
    if handler.response_streaming:
        serve_stream = _checked_responses(cast("Behavior", handler.unary_stream), reason)
        return grpc.unary_stream_rpc_method_handler(serve_stream, decode_or_none, encode)
    serve = cast("Behavior", handler.unary_unary)

    async def unary_unary(request: Any, context: Context) -> Any:
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        return await serve(request, context)

    return grpc.unary_unary_rpc_method_handler(unary_unary, decode_or_none, encode)


def _checked_responses(serve: Behavior, reason: str) -> Behavior:
    """A streaming method yields its responses, or writes them to its context: gRPC allows both."""
    if inspect.isasyncgenfunction(serve):

        async def yields(request: Any, context: Context) -> Any:
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
            async with aclosing(serve(request, context)) as responses:
                async for response in responses:
                    yield response

        return yields

    async def writes(request: Any, context: Context) -> Any:
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        await serve(request, context)

    return writes
