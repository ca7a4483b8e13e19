"""gRPC health checks (grpc.health.v1): whether the picker runs, and whether it can decide."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from router.picker.wire import picker_pb2 as wire

SERVICE = "grpc.health.v1.Health"
LIVENESS = "liveness"
READINESS = frozenset(("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"))
LOOK_EVERY_S = 1.0
"""How soon a watcher learns of a change."""
MAX_WATCHERS = 64


class Health:
    """Answers health checks. `lacks` returns what is missing for decisions; empty: it is ready."""

    def __init__(self, lacks: Callable[[], list[str]]) -> None:
        self._lacks = lacks
        self._watchers = 0

    def status(self, service: str) -> wire.HealthCheckResponse.ServingStatus:
        """Return the status of one of the services, whose names the endpoint picker protocol gives."""
        if service == LIVENESS:
            return wire.HealthCheckResponse.SERVING
        if service not in READINESS:
            return wire.HealthCheckResponse.SERVICE_UNKNOWN
        return wire.HealthCheckResponse.NOT_SERVING if self._lacks() else wire.HealthCheckResponse.SERVING

    async def check(self, request: wire.HealthCheckRequest, context: Any) -> wire.HealthCheckResponse:
        """Return the status now."""
        status = self.status(request.service)
        if status == wire.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known: {LIVENESS}, {', '.join(sorted(READINESS - {''}))}")
        return wire.HealthCheckResponse(status=status)

    async def watch(self, request: wire.HealthCheckRequest, context: Any) -> AsyncIterator[wire.HealthCheckResponse]:
        """Yield the status now, and after each change."""
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch already")
        self._watchers += 1
        try:
            last = None
            while True:
                status = self.status(request.service)
                if status != last:
                    last = status
                    yield wire.HealthCheckResponse(status=status)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._watchers -= 1

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service, for a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    self.check, wire.HealthCheckRequest.FromString, wire.HealthCheckResponse.SerializeToString
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self.watch, wire.HealthCheckRequest.FromString, wire.HealthCheckResponse.SerializeToString
                ),
            },
        )
