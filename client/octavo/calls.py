"""Requests and answers of the client's calls, as plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octavo.chain import AnyChain, key_at
from octavo.deadline import Deadline
from octavo.errors import InvalidRequest
from octavo.results import FlushResult, Hold, Match, Run, Statistics, TierStatistics
from octavo.session import Session
from octavo.status import Status, Tier, known_statuses
from octavo.transfer import RowSource, Transfer
from octavo.transport.base import GetOrder, PutOrder
from octavo_proto import columns
from octavo_proto.layout import Layout
from octavo_proto.limits import KEY_BYTES, LAYOUTS_PER_SESSION_MAX
from octavo_proto.v1 import admin_pb2, cache_pb2

VARIANT_MAX = 2**16 - 1

POSITIONS_FEATURE = "positions"
"""Of nodes that reserve those pages of a chain that a session puts in its turn."""


@lru_cache(maxsize=LAYOUTS_PER_SESSION_MAX)
def fingerprint_of(layout: Layout) -> bytes:
    """The layout's fingerprint, hashed once."""
    return layout.fingerprint()


def chain_message(
    session: Session, chain: AnyChain, namespace_index: int, layout_index: int, page_end: int
) -> cache_pb2.Chain:
    """The first ``page_end`` pages, hashed under the session's namespace key.

    Raises:
        InvalidRequest: longer than the node allows.
    """
    if page_end > session.limits.chain_pages_max:
        raise InvalidRequest(
            f"the chain has {page_end} pages, this node allows {session.limits.chain_pages_max}"
        )
    keys = chain.keys_under(session.namespace_key(chain.namespace))
    return cache_pb2.Chain(
        namespace_index=namespace_index,
        layout_index=layout_index,
        keys=keys[: page_end * KEY_BYTES],
        unlinked=chain.is_unlinked,
    )


def chain_part(message: cache_pb2.Chain, first_page: int) -> cache_pb2.Chain:
    """The chain from ``first_page`` on, with its parent's key unless it is unlinked."""
    if first_page == 0:
        return message
    parent_key = b"" if message.unlinked else key_at(message.keys, first_page - 1)
    return cache_pb2.Chain(
        namespace_index=message.namespace_index,
        layout_index=message.layout_index,
        keys=message.keys[first_page * KEY_BYTES :],
        parent_key=parent_key,
        unlinked=message.unlinked,
    )


def ask_match(
    session: Session, chain: cache_pb2.Chain, *, hold: bool, hint: cache_pb2.SessionHint | None
) -> cache_pb2.MatchRequest:
    return cache_pb2.MatchRequest(session_id=session.session_id, chain=chain, hold=hold, hint=hint)


def match_result(
    response: cache_pb2.MatchResponse,
    chain: AnyChain,
    session: Session,
    release: Callable[[Hold], bool],
) -> Match:
    """The client's view of a match; a node cannot make it longer than the chain."""
    page_count = min(response.page_count, chain.page_count)
    hold = None
    if response.hold_id:
        held_pages = chain.page_count if chain.is_unlinked else page_count
        hold = Hold(response.hold_id, chain, held_pages, response.hold_ms / 1000, session, release)
    present: NDArray[np.bool_] = np.frombuffer(response.present, dtype=np.uint8) == 1
    return Match(
        page_count=page_count,
        token_count=page_count * chain.page_tokens,
        runs=tuple(
            Run(Tier.of(run.tier), run.node, run.page_count, run.load_us / 1e6)
            for run in response.runs
        ),
        pending_count=response.pending_count,
        present=present,
        hold=hold,
    )


def get_order(
    session: Session,
    chain: cache_pb2.Chain,
    hold_id: int,
    transfer: Transfer,
    wait_pending: bool,
    deadline: Deadline,
    hint: cache_pb2.SessionHint | None = None,
) -> GetOrder:
    return GetOrder(
        session_id=session.session_id,
        chain=chain,
        hold_id=hold_id,
        transfer=transfer,
        fingerprint=fingerprint_of(transfer.layout),
        wait_pending=wait_pending,
        deadline=deadline,
        hint=hint,
    )


def checked_puts(
    session: Session,
    chain: cache_pb2.Chain,
    transfer: Transfer,
    source: RowSource,
    variants: int | Sequence[int] | None,
    deadline: Deadline,
    retention: cache_pb2.Retention | None = None,
    hint: cache_pb2.SessionHint | None = None,
) -> PutOrder:
    """The order for a put whose source has begun.

    Raises:
        InvalidRequest: lengths or variants that do not fit the transfer, or pages chosen where
            the node reserves only whole chains.
    """
    if transfer.chosen is not None and POSITIONS_FEATURE not in session.node.features:
        raise InvalidRequest(f"node {session.node.server} cannot reserve some positions only")
    lengths = source.unit_lengths()
    page_count = transfer.page_count
    if len(lengths) not in (1, page_count, transfer.row_count):
        raise InvalidRequest(
            f"the source states {len(lengths)} unit lengths for {page_count} pages of "
            f"{len(transfer.units)} units"
        )
    if variants is None:
        by_page = source.page_variants()
    else:
        stated = [variants] if isinstance(variants, int) else list(variants)
        if any(not 0 < variant <= VARIANT_MAX for variant in stated):
            raise InvalidRequest(f"variants must be 1 to {VARIANT_MAX}")
        by_page = np.array(stated, dtype=np.uint16)
    if len(by_page) not in (1, page_count):
        raise InvalidRequest(f"{len(by_page)} variants for {page_count} pages")
    return PutOrder(
        session.session_id, chain, transfer, lengths, by_page, deadline, retention, hint
    )


def statuses_of(column: bytes) -> list[Status]:
    """A column of statuses, one a page."""
    statuses = known_statuses(columns.read("statuses", column, columns.U8))
    return [Status(number) for number in statuses.tolist()]


def flush_result(response: cache_pb2.FlushResponse) -> FlushResult:
    return FlushResult(response.durable_pages, response.volatile_pages)


def statistics_of(response: admin_pb2.GetStatisticsResponse) -> Statistics:
    return Statistics(
        node_id=response.node_id,
        boot_id=response.boot_id,
        version=response.version,
        uptime_s=response.uptime_s,
        tiers=tuple(
            TierStatistics(
                tier.tier, tier.capacity_bytes, tier.used_bytes, tier.page_bytes, tier.page_count
            )
            for tier in response.tiers
        ),
        counters=dict(response.counters),
        gauges=dict(response.gauges),
        problems=tuple(response.problems),
    )
