"""/metrics, /healthz and /readyz against counted truth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo_server.addresses import HostPort
from octavo_server.telemetry.http import HttpPort
from octavo_server.telemetry.metrics import Metrics
from octavo_server.telemetry.snapshot import Snapshot, TierSnapshot

ANY_PORT = HostPort("127.0.0.1", 0)
SNAPSHOT = Snapshot(
    node_id='n"1',
    boot_id="b1",
    version="0.1.0",
    uptime_s=12.5,
    ready=True,
    draining=False,
    tiers=(
        TierSnapshot("memory", 1 << 40, 4096, 4000, 1),
        TierSnapshot("nvme", 1 << 41, 8192, 8000, 2),
    ),
    counters={"put_bytes": 2**53 - 1, "pages_stored": 3, "pages_corrupt": 0},
    gauges={"sessions": 2.0, "queue_bytes": 0.5},
)


def samples(text: str) -> dict[tuple[str, str], float]:
    """Value by (sample name, tier)."""
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def with_port(
    snapshot: Callable[[], Snapshot],
    use: Callable[[aiohttp.ClientSession, HttpPort], Awaitable[None]],
) -> None:
    async def run() -> None:
        port = HttpPort(ANY_PORT, snapshot)
        await port.start()
        try:
            async with aiohttp.ClientSession(f"http://{port.address}") as session:
                await use(session, port)
        finally:
            await port.stop()

    asyncio.run(run())


def test_metrics_equal_the_snapshot_they_were_made_from() -> None:
    found = samples(Metrics(lambda: SNAPSHOT).render().decode())
    for name, count in SNAPSHOT.counters.items():
        assert found[f"octavo_{name}_total", ""] == count
    for name, value in SNAPSHOT.gauges.items():
        assert found[f"octavo_{name}", ""] == value
    for tier in SNAPSHOT.tiers:
        assert found["octavo_tier_capacity_bytes", tier.tier] == tier.capacity_bytes
        assert found["octavo_tier_used_bytes", tier.tier] == tier.used_bytes
        assert found["octavo_tier_page_bytes", tier.tier] == tier.page_bytes
        assert found["octavo_tier_page_count", tier.tier] == tier.page_count
    assert found["octavo_uptime_seconds", ""] == 12.5
    assert found["octavo_ready", ""] == 1


def test_each_scrape_sees_the_present() -> None:
    states = [SNAPSHOT, replace(SNAPSHOT, counters={"pages_stored": 4}, problems=("x",))]
    metrics = Metrics(lambda: states.pop(0))
    assert samples(metrics.render().decode())["octavo_pages_stored_total", ""] == 3
    second = samples(metrics.render().decode())
    assert second["octavo_pages_stored_total", ""] == 4
    assert second["octavo_problems", ""] == 1


@pytest.mark.parametrize(
    ("change", "healthy", "ready"),
    [
        ({}, 200, 200),
        ({"problems": ("the reaper died",)}, 503, 200),
        ({"warnings": ("buffered I/O",)}, 200, 200),
        ({"ready": False}, 200, 503),
        ({"draining": True}, 200, 503),
    ],
)
def test_health_and_readiness(change: dict[str, object], healthy: int, ready: int) -> None:
    now = replace(SNAPSHOT, **change)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    async def ask(session: aiohttp.ClientSession, port: HttpPort) -> None:
        del port
        async with session.get("/healthz") as answer:
            assert answer.status == healthy
            body = json.loads(await answer.text())
            assert body["problems"] == list(now.problems)
            assert body["warnings"] == list(now.warnings)
            assert body["node_id"] == now.node_id
        async with session.get("/readyz") as answer:
            assert answer.status == ready

    with_port(lambda: now, ask)


def test_metrics_over_http_parse() -> None:
    async def ask(session: aiohttp.ClientSession, port: HttpPort) -> None:
        del port
        async with session.get("/metrics") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert samples(await answer.text())["octavo_pages_stored_total", ""] == 3

    with_port(lambda: SNAPSHOT, ask)


def test_only_get_of_known_paths_is_answered() -> None:
    async def ask(session: aiohttp.ClientSession, port: HttpPort) -> None:
        del port
        async with session.post("/healthz", data=b"x" * 100_000) as answer:
            assert answer.status == 405
        for path in ("/", "/metrics/..%2f", "/debug", "/healthz/x"):
            async with session.get(path) as answer:
                assert answer.status == 404
        async with session.get("/healthz") as answer:
            assert answer.status == 200

    with_port(lambda: SNAPSHOT, ask)


def test_port_in_use_is_an_error_and_leaves_nothing_behind() -> None:
    async def ask(session: aiohttp.ClientSession, port: HttpPort) -> None:
        del session
        assert port.address is not None
        second = HttpPort(port.address, lambda: SNAPSHOT)
        with pytest.raises(OSError, match="in use"):
            await second.start()
        assert second.address is None
        await second.stop()

    with_port(lambda: SNAPSHOT, ask)


def test_stop_may_be_called_twice_and_frees_the_port() -> None:
    async def run() -> None:
        port = HttpPort(ANY_PORT, lambda: SNAPSHOT)
        await port.start()
        address = port.address
        assert address is not None
        await port.stop()
        await port.stop()
        again = HttpPort(address, lambda: SNAPSHOT)
        await again.start()
        await again.stop()

    asyncio.run(run())
