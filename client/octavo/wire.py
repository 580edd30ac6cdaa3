"""gRPC as the rest of the client sees it: typed stubs, deadlines, the client's own errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, Protocol, TypeVar, cast

import grpc

from octavo.address import Address
from octavo.deadline import CallScope, Deadline, current_scope
from octavo.errors import CallCancelled, ConnectError, NodeFailed, OctavoError, error_of
from octavo_proto.limits import MESSAGE_BYTES_MAX
from octavo_proto.v1 import admin_pb2_grpc, cache_pb2, cache_pb2_grpc

Response = TypeVar("Response")
Response_co = TypeVar("Response_co", covariant=True)

SINGLE_THREADED_UNARY_STREAM: Final = "SingleThreadedUnaryStream"
"""``grpc.experimental.ChannelOptions.SingleThreadedUnaryStream``, which has no type stubs."""

_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Each channel dials for itself, so a new one never inherits an old one's dialling backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # A cache on this host or in this cluster is not behind the web proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # A get's messages are read by the thread that copies them: no other has to be woken.
    (SINGLE_THREADED_UNARY_STREAM, 1),
]


class Pending(Protocol[Response_co]):
    """A unary call in progress."""

    def result(self, timeout: float | None = None) -> Response_co: ...
    def cancel(self) -> object: ...
    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


class Wire:
    """One channel to a node. Safe for use by several threads; not across a fork."""

    def __init__(self, address: Address) -> None:
        """Nothing is dialled yet.

        Raises:
            ConnectError: this process was forked from one whose client had dialled.
        """
        _require_own_grpc()
        self.address: Final = address
        self._channel = grpc.insecure_channel(address.target, options=_OPTIONS)
        self.cache: Final = cache_pb2_grpc.CacheStub(self._channel)
        self.admin: Final = admin_pb2_grpc.AdminStub(self._channel)
        self._sent: set[Pending[Any]] = set()
        self._sent_lock = threading.Lock()

    def close(self) -> None:
        """Ends every call in progress and the connection."""
        self._channel.close()

    def unary(self, method: Any, request: Any, deadline: Deadline) -> Any:
        """One request, one answer.

        Raises:
            OctavoError: see the table in ``errors``.
        """
        timeout_s = deadline.require_s()
        scope = current_scope.get()
        try:
            if scope is None:  # a blocking call wakes one thread less than a future
                return method(request, timeout=timeout_s)
            pending = method.future(request, timeout=timeout_s)
            with scope.watching(pending):
                return pending.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise translate(error) from None
        except ValueError as error:  # grpc's way to say that the channel is closed
            raise _closed_channel(error) from None

    def start(self, method: Any, request: Any, timeout_s: float) -> Pending[Any]:
        """A request whose answer is collected later with ``finish``."""
        try:
            return cast("Pending[Any]", method.future(request, timeout=timeout_s))
        except ValueError as error:
            raise _closed_channel(error) from None

    def send(self, method: Any, request: Any, timeout_s: float) -> None:
        """A request whose answer nobody waits for. Failures are silent: use it only for what
        the node does by itself in time."""
        self.see_off(self.start(method, request, timeout_s))

    def see_off(self, pending: Pending[Any]) -> None:
        """Lets a call that was started go on to its end although nobody waits for it any more:
        gRPC cancels one whose future is collected before that."""
        with self._sent_lock:
            self._sent.add(pending)
        pending.add_done_callback(self._forget)

    def _forget(self, pending: Pending[Any]) -> None:
        with self._sent_lock:
            self._sent.discard(pending)

    def get(
        self, request: cache_pb2.GetRequest, deadline: Deadline
    ) -> Generator[cache_pb2.GetResponse]:
        """The stream of a get. Closing the iterator early cancels the call."""
        scope = current_scope.get() or CallScope()
        try:
            call = self.cache.Get(request, timeout=deadline.require_s())
        except ValueError as error:
            raise _closed_channel(error) from None
        with scope.watching(call):
            try:
                yield from call
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                raise translate(error) from None
            finally:
                call.cancel()

    def put(
        self, requests: Iterable[cache_pb2.PutRequest], deadline: Deadline
    ) -> cache_pb2.PutResponse:
        """Streams requests and answers the node's account."""
        scope = current_scope.get() or CallScope()
        try:
            call = self.cache.Put.future(iter(requests), timeout=deadline.require_s())
            with scope.watching(call):
                return call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise translate(error) from None
        except ValueError as error:
            raise _closed_channel(error) from None


_dialled_by_pid: int | None = None


def _require_own_grpc() -> None:
    """gRPC's threads do not survive a fork: in such a child a new channel often hangs for ever,
    before any deadline applies, unless gRPC was told to prepare for forks. A clear miss instead.
    """
    global _dialled_by_pid
    pid = os.getpid()
    if _dialled_by_pid is None:
        _dialled_by_pid = pid
    prepared = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes")
    if _dialled_by_pid != pid and not prepared:
        raise ConnectError(
            "this process was forked after a client had connected, which gRPC does not support: "
            "start workers by spawn, fork before the first call, or set "
            "GRPC_ENABLE_FORK_SUPPORT=1 before importing grpc"
        )


def finish(pending: Pending[Response], timeout_s: float) -> Response:
    """The answer of a call that was started.

    Raises:
        OctavoError: see the table in ``errors``; NodeTimeout also if it is not there in time.
    """
    scope = current_scope.get() or CallScope()
    try:
        with scope.watching(pending):
            return pending.result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        raise error_of(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        raise translate(error) from None


def translate(error: grpc.RpcError | grpc.FutureCancelledError) -> OctavoError:
    """The client's error for whatever gRPC raised."""
    scope = current_scope.get()
    if scope is not None and scope.cancelled:
        return CallCancelled("cancelled")
    if isinstance(error, grpc.FutureCancelledError):
        return error_of(grpc.StatusCode.CANCELLED, "the call was cancelled")
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    if not callable(code) or not callable(details):
        return NodeFailed(str(error))
    return error_of(cast("grpc.StatusCode", code()), str(details() or ""))


def _closed_channel(error: ValueError) -> OctavoError:
    # gRPC says "closed channel" or "Channel closed", depending on how far the call came.
    message = str(error).lower()
    if "channel" not in message or "closed" not in message:
        raise error
    return error_of(grpc.StatusCode.CANCELLED, "the channel was closed")
