"""Finding a node and asking it for its statistics."""

from __future__ import annotations

import os
from typing import Final

import grpc

from octavo.address import default_address, parse_address
from octavo.cli.errors import CommandError
from octavo.errors import InvalidRequest
from octavo_proto.v1 import admin_pb2, admin_pb2_grpc

TIMEOUT_S: Final = 5.0


def node_address(address: str | None) -> str:
    """``address``, else ``$OCTAVO_ADDRESS``, else the default socket; as gRPC wants it.

    Raises:
        CommandError: the address is malformed.
    """
    text = (address or default_address()).strip()
    try:
        return parse_address(f"unix:{text}" if text.startswith("/") else text).target
    except InvalidRequest as error:
        raise CommandError(str(error), 2) from None


def get_statistics(address: str, timeout_s: float = TIMEOUT_S) -> admin_pb2.GetStatisticsResponse:
    """What the node at ``address`` (from ``node_address``) says about itself.

    Raises:
        CommandError: no node answers there within ``timeout_s``.
    """
    path = address.removeprefix("unix:")
    if address.startswith("unix:") and not os.path.exists(path):
        raise CommandError(f"no node at {path}: no such socket; is `octavo serve` running?")
    with grpc.insecure_channel(address) as channel:
        try:
            return admin_pb2_grpc.AdminStub(channel).GetStatistics(
                admin_pb2.GetStatisticsRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            name = code.name if code is not None else type(error).__name__
            raise CommandError(f"no answer from the node at {address}: {name}") from None
