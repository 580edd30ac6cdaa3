"""Parts of answers, from the cache's values to messages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from octavo_proto import limits
from octavo_proto.v1 import cache_pb2
from octavo_server.cache import matching
from octavo_server.cache.page_cache import PageCache
from octavo_server.rpc.sessions import Sessions


def limits_of(cache: PageCache, sessions: Sessions) -> cache_pb2.Limits:
    """What the node allows."""
    bounds = cache.limits
    return cache_pb2.Limits(
        chain_pages_max=bounds.chain_pages_max,
        message_bytes_max=limits.MESSAGE_BYTES_MAX,
        unit_bytes_max=cache.memory.unit_bytes_max,
        staging_ring_bytes=sessions.ring_bytes,
        lease_ms_max=int(bounds.lease_s * 1000),
        hold_ms_max=int(bounds.hold_s * 1000),
        reservation_ms_max=int(bounds.reservation_s * 1000),
        leases_max=bounds.leases_max,
        holds_max=bounds.holds_max,
        reservations_max=bounds.reservations_max,
        session_idle_ms=int(sessions.idle_s * 1000),
    )


def runs_of(cache: PageCache, found: matching.Match) -> list[cache_pb2.Run]:
    """Stretches of the prefix that lie in the same tier."""
    in_memory = found.in_memory
    bounds = [*np.flatnonzero(np.diff(in_memory.astype(np.int8), prepend=-1)), len(in_memory)]
    runs: list[cache_pb2.Run] = []
    for begin, end in pairwise(map(int, bounds)):
        run = cache_pb2.Run(page_count=end - begin, tier=cache_pb2.TIER_MEMORY)
        if not in_memory[begin]:
            run.tier = cache_pb2.TIER_NVME
            run.load_us = int(matching.load_seconds(cache, found.rows[begin:end]) * 1e6)
        runs.append(run)
    return runs
