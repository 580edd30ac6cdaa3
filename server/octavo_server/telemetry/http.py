"""The HTTP port: /metrics, /healthz and /readyz for machines that watch the node.

It answers GET only, reads no bodies, knows no secrets, and touches no page.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web

from octavo_server.addresses import HostPort
from octavo_server.telemetry.metrics import CONTENT_TYPE, Metrics
from octavo_server.telemetry.snapshot import Snapshot

REQUEST_BYTES_MAX: Final = 4096
BACKLOG: Final = 64
KEEPALIVE_S: Final = 15.0
"""Scrapers come every 15 s or so; whoever stays silent for longer pays a new connection."""

STOP_TIMEOUT_S: Final = 1.0

_log = logging.getLogger(__name__)


class HttpPort:
    """Serves what ``snapshot`` answers on ``address``. Start and stop it on one event loop.

    - ``/healthz``: 200 while the process works; 503 with ``problems`` when a background task
      died or a device is out of service.
    - ``/readyz``: 200 while the node takes new work; 503 before it serves, and while it drains.
    - ``/metrics``: Prometheus text.
    """

    def __init__(self, address: HostPort, snapshot: Callable[[], Snapshot]) -> None:
        self._wanted = address
        self._snapshot = snapshot
        self._metrics = Metrics(snapshot)
        self._runner: web.AppRunner | None = None
        self._bound: HostPort | None = None

    @property
    def address(self) -> HostPort | None:
        """Where it listens, with the real port where any was asked for; None when stopped."""
        return self._bound

    async def start(self) -> None:
        """Binds and serves. Raises OSError if the address cannot be had."""
        app = web.Application(client_max_size=REQUEST_BYTES_MAX)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._render_metrics),
            ]
        )
        runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=STOP_TIMEOUT_S
        )
        await runner.setup()
        site = web.TCPSite(runner, self._wanted.host, self._wanted.port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._bound = HostPort(str(host), int(port))
        _log.info("http listens on %s", self._bound)

    async def stop(self) -> None:
        """Closes the port and its connections. May be called twice."""
        runner, self._runner, self._bound = self._runner, None, None
        if runner is not None:
            await runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        del request
        now = self._snapshot()
        body = {"healthy": not now.problems, "problems": now.problems, "warnings": now.warnings}
        return _answer(now, body, ok=not now.problems)

    async def _readyz(self, request: web.Request) -> web.Response:
        del request
        now = self._snapshot()
        ready = now.ready and not now.draining
        return _answer(now, {"ready": ready, "draining": now.draining}, ok=ready)

    async def _render_metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _answer(now: Snapshot, body: Mapping[str, object], *, ok: bool) -> web.Response:
    text = json.dumps({"node_id": now.node_id, "boot_id": now.boot_id, **body})
    return web.Response(text=text, status=200 if ok else 503, content_type="application/json")
