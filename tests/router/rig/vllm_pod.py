"""An engine with the observed behaviour of vLLM 0.32 while it drains, sleeps or is full, and when its core dies."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from engine.common.sse import DONE, sse_event
from tests.router.rig.helpers import ScriptedEngine

DRAINS = "cannot schedule new futures after shutdown"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
FULL = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."


def error(message: str, kind: str = "InternalServerError", code: int = 500) -> bytes:
    """Return an error in vLLM's words."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


class VllmPod(ScriptedEngine):
    """Sends one of `words` every `gap_s`. Flags may be set at any time. `dev`: `/is_sleeping` exists."""

    def __init__(
        self, name: str, words: int = 5, *, gap_s: float = 0.0, dev: bool = True, forced_usage: bool = False
    ) -> None:
        super().__init__(None, self._answer)
        self.name = name
        self.words = words
        self.gap_s = gap_s
        self.dev = dev
        self.forced_usage = forced_usage
        """As with --enable-force-include-usage: every event has usage, but early events have no cached tokens."""
        self.cached_tokens = 96
        self.draining = False
        self.asleep = False
        self.says_so = True
        """If False, a probe does not see that the pod sleeps, as if the pod had fallen asleep after its last probe."""
        self.dead = False
        self.aborting = False
        """Running requests are given up as after /sleep, or after SIGTERM without --shutdown-timeout. Before the first
        token there is no notice."""
        self.most: int | None = None
        """As --max-num-queued-reqs."""
        self.prefill_s = 0.0
        self.core_is_busy = False
        """Whether a long step is running. Requests to the core wait for its end."""
        self.told = 0
        """Words sent so far, in all answers."""
        self.naps_asked = 0
        self.hung = 0

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [card]})

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_get("/is_sleeping", self._is_sleeping)

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        self.naps_asked += 1
        if not self.dev:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.draining:
            return web.Response(status=500, body=error("Server shutting down"), content_type="application/json")
        while self.core_is_busy:  # noqa: ASYNC110  # as in vLLM, the core answers between steps
            await asyncio.sleep(0.01)
        return web.json_response({"is_sleeping": self.asleep and self.says_so})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        fields = orjson.loads(await request.read())
        if self.draining:
            refused = web.Response(status=500, body=error(DRAINS), content_type="application/json")
            refused.force_close()
            return refused
        if self.dead:
            return web.Response(status=500, body=error(DEAD), content_type="application/json")
        if self.most is not None and self.open > self.most:
            body = error(FULL, "Service Unavailable", 503)
            return web.Response(status=503, body=body, content_type="application/json")
        self.hung += 1
        while self.asleep:  # noqa: ASYNC110  # a pod that sleeps takes requests and answers none
            await asyncio.sleep(0.01)
        self.hung -= 1
        await asyncio.sleep(self.prefill_s)
        if not fields.get("stream"):
            return await self._whole()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        tells_usage = self.forced_usage or (fields.get("stream_options") or {}).get("include_usage")
        for i, event in enumerate([self._event(i) for i in range(self.words)]):
            if self.dead:
                await response.write(sse_event(error(DEAD)) + DONE)
                return response
            if self.aborting:
                end = (self._end("abort") if i else b"") + (self._usage(i) if tells_usage else b"")
                await response.write(end + DONE)
                return response
            await response.write(event)
            self.told += 1
            await asyncio.sleep(self.gap_s)
        await response.write(self._end("length"))
        if tells_usage:
            await response.write(self._usage(self.words))
        await response.write(DONE)
        return response

    async def _whole(self) -> web.Response:
        for _ in range(self.words):
            if self.aborting or self.dead:
                break
            self.told += 1
            await asyncio.sleep(self.gap_s)
        if self.dead:
            return web.Response(status=500, body=error(DEAD), content_type="application/json")
        finish = "abort" if self.aborting else "length"
        text = "".join(f" w{i}" for i in range(self.words))
        return web.json_response(
            {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": self._counts(self.words)}
        )

    def _counts(self, made: int, cached: int | None = None) -> dict[str, Any]:
        counts: dict[str, Any] = {"prompt_tokens": 150, "total_tokens": 150 + made, "completion_tokens": made}
        return counts if cached is None else {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _event(self, i: int) -> bytes:
        usage = {"usage": self._counts(i + 1)} if self.forced_usage else {}
        choice = {"index": 0, "text": f" w{i}", "logprobs": None, "finish_reason": None}
        return sse_event(orjson.dumps({"id": self.name, "choices": [choice], **usage}))

    def _end(self, reason: str) -> bytes:
        usage = {"usage": self._counts(self.words)} if self.forced_usage else {}
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}
        return sse_event(orjson.dumps({"id": self.name, "choices": [choice], **usage}))

    def _usage(self, made: int) -> bytes:
        counts = self._counts(made, self.cached_tokens)
        return sse_event(orjson.dumps({"id": self.name, "choices": [], "usage": counts}))
