"""``octavo bench start``: from exec to SERVING, and the memory of a node that holds nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Final, cast

import grpc

from octavo.bench.measuring import median, progress
from octavo.local_node import LocalNode

MEMORY: Final = "8GiB"
POLL_S: Final = 0.005
_HEALTH: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"
"""A HealthCheckResponse whose only field says SERVING."""


def run(*, rounds: int = 5) -> Mapping[str, object]:
    """Medians over ``rounds`` starts of ``octavo serve`` with an arena of 8 GiB."""
    serving_s: list[float] = []
    resident_bytes: list[float] = []
    for _ in progress(range(rounds), "start", rounds):
        command = (sys.executable, "-m", "octavo.cli", "serve")
        with LocalNode(command=command, memory_bytes=MEMORY) as node:
            begin = time.perf_counter()
            node.launch()
            while not _serves(node.address):
                node.require_running()
                time.sleep(POLL_S)
            serving_s.append(time.perf_counter() - begin)
            resident_bytes.append(node.memory_bytes("VmRSS") - node.memory_bytes("RssShmem"))
            node.stop()
    return {
        "memory": MEMORY,
        "rounds": rounds,
        "serving_s": median(serving_s),
        "resident_empty_mb": median(resident_bytes) / 1e6,
    }


def _serves(address: str) -> bool:
    # A channel a try: one that failed waits a second before it connects again.
    with grpc.insecure_channel(address) as channel:
        check: Any = cast("Any", channel).unary_unary(_HEALTH)
        try:
            return bool(check(b"", timeout=1.0) == _SERVING)
        except grpc.RpcError:
            return False
