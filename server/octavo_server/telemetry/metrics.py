"""Prometheus text from a snapshot.

Metrics are made from the same counters that ``GetStatistics`` answers with, at the moment
of the scrape, so that the two cannot tell different stories. ``docs/operations.md`` lists
the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from octavo_server.telemetry.snapshot import Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _NodeCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        info = GaugeMetricFamily(
            "octavo_node_info",
            "Always 1; says who answers.",
            labels=("node_id", "boot_id", "version"),
        )
        info.add_metric((now.node_id, now.boot_id, now.version), 1.0)
        yield info
        yield GaugeMetricFamily(
            "octavo_uptime_seconds", "Seconds since the node began to serve.", value=now.uptime_s
        )
        yield GaugeMetricFamily("octavo_ready", "1 while new work is taken.", value=now.ready)
        yield GaugeMetricFamily(
            "octavo_problems", "Things wrong with the node; see /healthz.", value=len(now.problems)
        )
        yield from _tiers(now)
        for name, count in sorted(now.counters.items()):
            yield CounterMetricFamily(f"octavo_{name}", _words(name), value=count)
        for name, value in sorted(now.gauges.items()):
            yield GaugeMetricFamily(f"octavo_{name}", _words(name), value=value)


def _tiers(now: Snapshot) -> Iterable[Metric]:
    for name, text in (
        ("capacity_bytes", "Bytes the tier may hold."),
        ("used_bytes", "Bytes of slots in use."),
        ("page_bytes", "Bytes of page content."),
        ("page_count", "Pages in the tier."),
    ):
        family = GaugeMetricFamily(f"octavo_tier_{name}", text, labels=("tier",))
        for tier in now.tiers:
            family.add_metric((tier.tier,), float(getattr(tier, name)))
        yield family


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize() + "."


class Metrics:
    """Renders a node's metrics. ``render`` calls ``snapshot`` once."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_NodeCollector(snapshot))

    def render(self) -> bytes:
        """The text of /metrics, in Prometheus' format 0.0.4."""
        return generate_latest(self._registry)
