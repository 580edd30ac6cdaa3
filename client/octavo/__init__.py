"""Octavo's client: KV pages of a prompt, matched, got and put.

    import octavo

    layout = octavo.Layout(name="main", model="...", layers=32, kv_heads=8, head_dim=128)
    with octavo.Client(layouts=[layout]) as client:
        chain = client.chain(token_ids)
        found = client.match(chain)
        client.get(chain, octavo.BufferSink(buffer, layout.raw_unit_bytes(0)))

Importing this package does not import torch; ``octavo.paged`` and ``octavo.codec`` use it.
"""

from octavo.aio import AsyncClient
from octavo.breaker import BreakerState
from octavo.chain import AnyChain, Chain, ForeignChain
from octavo.client import Client
from octavo.codec.raw import RAW_VARIANT
from octavo.errors import (
    CallCancelled,
    ClientClosed,
    ConnectError,
    InvalidRequest,
    NodeBusy,
    NodeFailed,
    NodeTimeout,
    NodeUnavailable,
    OctavoError,
    SessionLost,
    SessionRefused,
    TransferError,
)
from octavo.health import Health
from octavo.results import (
    FlushResult,
    GetResult,
    Hold,
    Match,
    NodeInfo,
    PutResult,
    Run,
    Statistics,
    TierStatistics,
)
from octavo.sinks import BufferSink, BufferSource, Sink, Source
from octavo.status import Status, Tier
from octavo.transfer import Rows, RowSink, RowSource, Transfer
from octavo.version import __version__
from octavo.wishes import SessionHint
from octavo_proto.layout import KvKind, Layout, LayoutError, foreign_layout

__all__ = [
    "RAW_VARIANT",
    "AnyChain",
    "AsyncClient",
    "BreakerState",
    "BufferSink",
    "BufferSource",
    "CallCancelled",
    "Chain",
    "Client",
    "ClientClosed",
    "ConnectError",
    "FlushResult",
    "ForeignChain",
    "GetResult",
    "Health",
    "Hold",
    "InvalidRequest",
    "KvKind",
    "Layout",
    "LayoutError",
    "Match",
    "NodeBusy",
    "NodeFailed",
    "NodeInfo",
    "NodeTimeout",
    "NodeUnavailable",
    "OctavoError",
    "PutResult",
    "RowSink",
    "RowSource",
    "Rows",
    "Run",
    "SessionHint",
    "SessionLost",
    "SessionRefused",
    "Sink",
    "Source",
    "Statistics",
    "Status",
    "Tier",
    "TierStatistics",
    "Transfer",
    "TransferError",
    "__version__",
    "foreign_layout",
]
