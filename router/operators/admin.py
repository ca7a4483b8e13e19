"""Endpoints for operators: explain where a request would go and why, and empty the caches."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import aiohttp
from aiohttp import web

from engine.contract import headers
from engine.contract.errors import BadRequest, escaped, quoted
from engine.contract.resets import REPEATED_S, pauses_s, refusal
from router.choosing.chooser import Chooser
from router.edge.admission import Admission
from router.edge.body import BodyLimits, read_body
from router.edge.client_keys import ClientKeys
from router.edge.headers import UpstreamHeaders
from router.endpoints.intake import Reading
from router.events.feed import EventFeed
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.operators.audit import note
from router.operators.json_answer import json_response
from router.registry.index import PrefixIndex
from router.tenants.tenant import DEFAULT, Tenant

RESET_TIMEOUT_S = REPEATED_S + 5.0
"""Seconds for all attempts to empty one engine's cache."""
MAX_RESET_ANSWER_BYTES = 2**14
"""Most bytes read of an engine's answer to a reset."""
BODY_TIMEOUT_S = 60.0
MAX_FAILED_NOTED = 16
"""Most engines that an audit line names."""


class Admin:
    """Handlers of the operator's endpoints."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstream: UpstreamHeaders,
        fleet: Fleet,
        admission: Admission,
        reading: Reading,
        chooser: Chooser,
        index: PrefixIndex,
        events: EventFeed,
        bodies: BodyLimits,
        keys: ClientKeys,
    ) -> None:
        """`keys` finds a tenant by name."""
        self._session = session
        self._upstream = upstream
        self._fleet = fleet
        self._admission = admission
        self._reading = reading
        self._keys = keys
        self._chooser = chooser
        self._index = index
        self._events = events
        self._bodies = bodies

    async def explain(self, request: web.Request) -> web.Response:
        """Return every pod's score for the request in the body. The request goes to no engine.

        The header TENANT names the request's tenant, whose salt and named caches apply. Raises ApiError.
        """
        deadline_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        with self._admission.request() as admitted:
            body = await read_body(request, admitted, self._bodies, deadline_s)
            tenant = self._tenant(request)
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

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Empty the prefix cache of every engine: 200 if all did, otherwise 502 with the answer of each engine."""
        pods = self._fleet.answering()
        answers = await asyncio.gather(*(self._reset(pod) for pod in pods))
        failed = {pod.pod_id: answer for pod, answer in zip(pods, answers, strict=True) if answer != "ok"}
        note(request, engines=len(pods), failed=sorted(failed)[:MAX_FAILED_NOTED])
        body = {"pods": {pod.pod_id: failed.get(pod.pod_id, "ok") for pod in pods}}
        return json_response(body, status=502 if failed else 200)

    async def _reset(self, pod: Pod) -> str:
        """Return "ok", or why the engine did not empty its cache. Retry while the engine says that blocks are in use.

        The index forgets the pod's keys only if the cache was emptied.
        """
        said = ""
        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                said = await self._ask_reset(pod)
                for pause_s in pauses_s() if said else ():
                    await asyncio.sleep(pause_s)
                    said = await self._ask_reset(pod)
                    if not said:
                        break
        except TimeoutError:
            return said or f"no answer within {RESET_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return str(error) or type(error).__name__
        if said:
            return said
        for rank in self._fleet.ranks_of(pod):
            # If events account for the pod, its keys stay in the index. Events do not repeat a block that the pod
            # still holds. The events of the pod's next step report the blocks that are gone.
            if not self._events.accounts_for(rank.pod_id):
                self._index.drop(rank.pod_id)
            self._chooser.tell_forgotten(rank.pod_id, is_sure=True)
        return "ok"

    async def _ask_reset(self, pod: Pod) -> str:
        """Return an empty text if the engine emptied its cache, else why not. After a refusal, a retry may succeed.

        Raises aiohttp.ClientError, also for a status of 300 or more.
        """
        async with self._session.post(
            f"{pod.url}/reset_prefix_cache", headers=self._upstream.credentials_of(pod.key), allow_redirects=False
        ) as response:
            if response.status >= 300:
                raise aiohttp.ClientError(f"answered {response.status}")
            return refusal(await response.content.read(MAX_RESET_ANSWER_BYTES)) or ""
