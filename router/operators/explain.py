"""Explain where a request would go, and why."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from aiohttp import web

from engine.contract import headers
from engine.contract.errors import BadRequest, escaped, quoted
from router.choosing.chooser import Chooser
from router.edge.admission import Admission
from router.edge.body import BodyLimits, read_body
from router.edge.client_keys import ClientKeys
from router.edge.connection_limits import leave_fifo
from router.endpoints.intake import Reading
from router.operators.audit import note
from router.operators.json_answer import json_response
from router.tenants.tenant import DEFAULT, Tenant

BODY_TIMEOUT_S = 60.0


class Explain:
    """Handler of `/v1/route/explain`."""

    def __init__(
        self, admission: Admission, reading: Reading, chooser: Chooser, bodies: BodyLimits, keys: ClientKeys
    ) -> None:
        """`keys` finds a tenant by name."""
        self._admission = admission
        self._reading = reading
        self._chooser = chooser
        self._bodies = bodies
        self._keys = keys

    async def explain(self, request: web.Request) -> web.Response:
        """Return every pod's score for the request in the body. The request goes to no engine.

        The header TENANT names the request's tenant, whose salt and named caches apply. Raises ApiError.
        """
        deadline_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        with self._admission.request() as admitted:
            body = await read_body(request, admitted, self._bodies, deadline_s)
            tenant = self._tenant(request)
            leave_fifo(request)
            inbound = await self._reading.explained(body, request.headers, tenant, admitted)
        named = {"tenant": tenant.name} if headers.TENANT in request.headers else {}
        note(request, model=escaped(inbound.model), **named)
        choice, pods = self._chooser.explain(inbound)
        scores = {score.pod_id: asdict(score) for score in choice.decision.scores}
        return json_response(
            {
                "model": inbound.model,
                "tenant": tenant.name,
                "policy": choice.policy,
                "pod": choice.pod.pod_id,
                "prompt_tokens_estimated": inbound.prompt_tokens,
                "prefix_keys": len(inbound.keys),
                "cached_tokens_predicted": choice.cached_tokens,
                "ttft_predicted_s": choice.decision.predicted_ttft_s,
                "next_best": None
                if (rival := choice.decision.rival) is None
                else {"pod": pods[rival.pod][0].pod_id, "ttft_predicted_s": rival.ttft_s},
                "pods": [
                    {"pod": pod.pod_id, "url": pod.url, "view": view, "score": scores.get(pod.pod_id)}
                    for pod, view in pods
                ],
            }
        )

    def _tenant(self, request: web.Request) -> Tenant:
        """Return the tenant whose request is explained. Raises BadRequest, naming the header."""
        name = request.headers.get(headers.TENANT, DEFAULT.name)
        tenant = self._keys.tenant(name)
        if tenant is None:
            raise BadRequest(
                f"{headers.TENANT}: there is no tenant {quoted(name)} in --tenants-file", param=headers.TENANT
            )
        return tenant
