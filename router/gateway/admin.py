"""For operators: why a request would go where it goes, and emptying the caches."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import aiohttp
from aiohttp import web

from engine.contract.errors import escaped
from engine.contract.resets import REPEATED_S, pauses_s, refusal
from router.events.feed import EventFeed
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.gateway.admission import Admission
from router.gateway.audit import note
from router.gateway.body import BodyLimits, read_body
from router.gateway.chooser import Chooser
from router.gateway.headers import UpstreamHeaders
from router.gateway.inbound import Reader
from router.gateway.status import json_response
from router.registry.index import PrefixIndex

RESET_TIMEOUT_S = REPEATED_S + 5.0
"""For all attempts at one engine."""
MAX_RESET_ANSWER_BYTES = 2**14
"""What is read of an engine's answer to a reset."""
BODY_TIMEOUT_S = 60.0
MAX_FAILED_NOTED = 16
"""Engines that an audit line names."""


class Admin:
    """Handlers of the operator's endpoints."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstream: UpstreamHeaders,
        fleet: Fleet,
        admission: Admission,
        reader: Reader,
        chooser: Chooser,
        index: PrefixIndex,
        events: EventFeed,
        bodies: BodyLimits,
    ) -> None:
        self._session = session
        self._upstream = upstream
        self._fleet = fleet
        self._admission = admission
        self._reader = reader
        self._chooser = chooser
        self._index = index
        self._events = events
        self._bodies = bodies

    async def explain(self, request: web.Request) -> web.Response:
        """Every pod's score for the request in the body, which is not sent anywhere. Raises ApiError."""
        deadline_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        with self._admission.request() as admitted:
            body = await read_body(request, admitted, self._bodies, deadline_s)
            inbound = self._reader.read(None, body, request.headers)
        note(request, model=escaped(inbound.model))
        choice, pods, views = self._chooser.explain(inbound)
        scores = {score.pod_id: asdict(score) for score in choice.decision.scores}
        return json_response(
            {
                "model": inbound.model,
                "policy": choice.policy,
                "pod": choice.pod.pod_id,
                "prompt_tokens_estimated": inbound.prompt_tokens,
                "prefix_keys": len(inbound.keys),
                "cached_tokens_predicted": choice.cached_tokens,
                "ttft_predicted_s": choice.decision.predicted_ttft_s,
                "next_best": None
                if (rival := choice.decision.rival) is None
                else {"pod": pods[rival.pod].pod_id, "ttft_predicted_s": rival.ttft_s},
                "pods": [
                    {"pod": pod.pod_id, "url": pod.url, "view": asdict(view), "score": scores.get(pod.pod_id)}
                    for pod, view in zip(pods, views, strict=True)
                ],
            }
        )

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Empty the prefix cache of every engine: 200 when all did, 502 with each one's answer otherwise."""
        pods = self._fleet.answering()
        answers = await asyncio.gather(*(self._reset(pod) for pod in pods))
        failed = {pod.pod_id: answer for pod, answer in zip(pods, answers, strict=True) if answer != "ok"}
        note(request, engines=len(pods), failed=sorted(failed)[:MAX_FAILED_NOTED])
        body = {"pods": {pod.pod_id: failed.get(pod.pod_id, "ok") for pod in pods}}
        return json_response(body, status=502 if failed else 200)

    async def _reset(self, pod: Pod) -> str:
        """Repeated while the engine says that blocks are in use. What is believed of it goes only with its cache."""
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
            # What a publishing pod holds from here on, its reports say. Events are no such account of the whole: they
            # would not tell again of a block that is still held, and tell with the next step of those that are gone.
            if not self._events.accounts_for(rank.pod_id):
                self._index.drop(rank.pod_id)
            self._chooser.tell_forgotten(rank.pod_id, is_sure=True)
        return "ok"

    async def _ask_reset(self, pod: Pod) -> str:
        """Why the engine did not empty its cache, where another attempt may do better; empty: it did.

        Raises aiohttp.ClientError, also for a status that is no 2xx.
        """
        async with self._session.post(
            f"{pod.url}/reset_prefix_cache", headers=self._upstream.credentials_of(pod.key), allow_redirects=False
        ) as response:
            if response.status >= 300:
                raise aiohttp.ClientError(f"answered {response.status}")
            return refusal(await response.content.read(MAX_RESET_ANSWER_BYTES)) or ""
