"""Servers for the tests of commands, on real sockets and in their own thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from engine.contract import headers
from tests.loadgen.experiment.scripted_arms import ArmGateway


@dataclass
class LimitedGateway(ArmGateway):
    """Refuses concurrent requests beyond `limits[policy]`, and delays the others by `service_s`. Does not delay the
    first `quick` requests."""

    limits: dict[str, int] = field(default_factory=dict)
    service_s: float = 0.05
    quick: int = 0
    under_way: dict[str, int] = field(default_factory=dict)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        policy = request.headers.get(headers.POLICY, "")
        if policy not in self.limits:
            return await super()._chat(request)
        if self.under_way.get(policy, 0) >= self.limits[policy]:
            return web.json_response({"error": {"message": "full"}}, status=503)
        self.under_way[policy] = self.under_way.get(policy, 0) + 1
        try:
            self.quick -= 1
            await asyncio.sleep(0 if self.quick >= 0 else self.service_s)
            return await super()._chat(request)
        finally:
            self.under_way[policy] -= 1
