"""What the gateway says of itself and its fleet: health, readiness, metrics, models, pods."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from router.fleet.fleet import Fleet, Member
from router.gateway.admission import Admission
from router.gateway.registry import NoRegistry, RegistryView
from router.telemetry.metrics import GaugeValues, Metrics


class Status:
    """Handlers that read state and change none. `is_warm` is set once the registry was loaded, or given up on."""

    def __init__(self, fleet: Fleet, registry: RegistryView, admission: Admission, metrics: Metrics) -> None:
        self._fleet = fleet
        self._registry = registry
        self._admission = admission
        self._metrics = metrics
        self._has_registry = not isinstance(registry, NoRegistry)
        self.is_warm = not self._has_registry

    async def health(self, request: web.Request) -> web.Response:
        """200 while the process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 once requests can be routed well; the body says what is missing. Redis trouble alone is no reason."""
        admitted = len(self._fleet.admitted())
        missing = []
        if self._admission.is_draining:
            missing.append("the gateway is shutting down")
        if not admitted:
            missing.append("no engine answers")
        if not self.is_warm:
            missing.append("the registry is being loaded")
        detail = {
            "ready": not missing,
            "missing": missing,
            "pods": {"known": len(self._fleet.members()), "admitted": admitted},
            "registry": {"configured": self._has_registry, **asdict(self._registry.status())},
        }
        return json_response(detail, status=503 if missing else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        status = self._registry.status()
        values = GaugeValues(
            in_flight=self._admission.in_flight,
            pods_known=len(self._fleet.members()),
            pods_admitted=len(self._fleet.admitted()),
            registry_configured=self._has_registry,
            registry_connected=status.connected,
            registry_expired=status.expired,
            registry_pods_synced=status.pods_synced,
        )
        return web.Response(body=self._metrics.render(values), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, request: web.Request) -> web.Response:
        """The union of the pods' model lists, each as its first pod describes it."""
        cards = self._fleet.models()
        return json_response({"object": "list", "data": [orjson.Fragment(cards[name].card) for name in sorted(cards)]})

    async def pods(self, request: web.Request) -> web.Response:
        """Every engine of discovery: who it is, whether it takes requests, its load as the policies see it."""
        now_s = asyncio.get_running_loop().time()
        return json_response({"pods": [self._pod(member, now_s) for member in self._fleet.members()]})

    def _pod(self, member: Member, now_s: float) -> dict[str, Any]:
        pod = member.pod
        shown: dict[str, Any] = {
            "url": member.url,
            "pod": pod.pod_id if pod else None,
            "admitted": member.admitted,
            "failures": member.failures,
            "last_error": member.last_error,
        }
        if pod is not None:
            shown |= {
                "epoch": None if pod.epoch is None else str(pod.epoch),
                "models": [model.name for model in pod.identity.models],
                "in_flight": pod.in_flight,
                "publishes": self._registry.reports(pod.pod_id),
                "load": asdict(pod.state.view(pod.pod_id, now_s=now_s)),
            }
        return shown


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as a JSON response."""
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
