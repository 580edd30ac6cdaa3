"""The Admin service."""

from __future__ import annotations

from collections.abc import Callable

from octavo_proto.v1 import admin_pb2, admin_pb2_grpc
from octavo_server.rpc.status import Context
from octavo_server.telemetry.snapshot import Snapshot


class AdminService(admin_pb2_grpc.AdminServicer):
    """Renders the node's snapshot."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    async def GetStatistics(  # noqa: N802 - named by the protocol
        self, request: admin_pb2.GetStatisticsRequest, context: Context
    ) -> admin_pb2.GetStatisticsResponse:
        now = self._snapshot()
        return admin_pb2.GetStatisticsResponse(
            node_id=now.node_id,
            boot_id=now.boot_id,
            version=now.version,
            uptime_s=now.uptime_s,
            tiers=[
                admin_pb2.TierStatistics(
                    tier=tier.tier,
                    capacity_bytes=tier.capacity_bytes,
                    used_bytes=tier.used_bytes,
                    page_bytes=tier.page_bytes,
                    page_count=tier.page_count,
                )
                for tier in now.tiers
            ],
            counters=now.counters,
            gauges=now.gauges,
            problems=[*now.problems, *now.warnings],
        )
