"""Empty the prefix caches of all engines."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from engine.contract.resets import REPEATED_S, pauses_s, refusal
from router.choosing.chooser import Chooser
from router.edge.headers import UpstreamHeaders
from router.events.feed import EventFeed
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.operators.audit import note
from router.operators.json_answer import json_response
from router.registry.index import PrefixIndex

RESET_TIMEOUT_S = REPEATED_S + 5.0
"""Seconds for all attempts to empty one engine's cache."""
MAX_RESET_ANSWER_BYTES = 2**14
"""Most bytes read of an engine's answer to a reset."""
MAX_FAILED_NOTED = 16
"""Most engines that an audit line names."""


class Resets:
    """Handler of `/reset_prefix_cache`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstream: UpstreamHeaders,
        fleet: Fleet,
        chooser: Chooser,
        index: PrefixIndex,
        events: EventFeed,
    ) -> None:
        self._session = session
        self._upstream = upstream
        self._fleet = fleet
        self._chooser = chooser
        self._index = index
        self._events = events

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
