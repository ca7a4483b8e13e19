"""A stream whose client has the beginning of it: what is needed to have its rest from another pod."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from engine.contract.requests import Endpoint
from router.fleet.pod import Pod
from router.gateway.engine_client import BrokeOff
from router.gateway.errors import BadGateway, DeadlineExceeded
from router.gateway.inbound import Inbound
from router.gateway.outcome import Outcome
from router.gateway.relay import Relay, Source, UpstreamBroke
from router.gateway.resume import MAX_BODY_BYTES, Rewriter, Way, ask, ending, is_complete, obstacle, way_of
from router.gateway.said import Record, Said
from router.gateway.upstream import PodFailed
from router.routing.types import PodId


class Passed(web.StreamResponse):
    """An answer whose head goes out with the first of its body, in one packet."""

    _send_headers_immediately = False  # aiohttp's; without it, it is two packets


@dataclass(slots=True)
class Begun:
    """One answer under way. `record` is None where nobody is asked for its rest."""

    response: web.StreamResponse
    writer: AbstractStreamWriter
    is_stream: bool
    record: Record | None
    relay: Relay | None = None
    """The last one that copied a part of it."""
    broke: UpstreamBroke | None = None
    """How that ended."""
    defects: int = 0
    """Attempts in a row that broke at the place that has been reached: the request may be why."""
    prompt_tokens: int | None = None
    """Of the request, as an engine has said."""
    rewriter: Rewriter | None = None
    """For the attempt under way at the rest."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The request, once it had to be read again."""
    said: Said | None = None
    """All that the client has, as of the last break."""
    _made_then: int = -1

    def stopped(self, broke: UpstreamBroke, relay: Relay, inbound: Inbound, prompt_tokens: int | None) -> None:
        """A pod broke it, or fell silent. `prompt_tokens`: of the request, where it has said so."""
        self.broke, self.relay = broke, relay
        if self.prompt_tokens is None:
            self.prompt_tokens = prompt_tokens
        if self.record is None or not self.record.is_kept:
            return
        if not self.fields and len(inbound.body) <= MAX_BODY_BYTES:
            self.fields = orjson.loads(inbound.body)
        self.said = self.record.read()
        if self.said.made > self._made_then:
            self._made_then, self.defects = self.said.made, 0
        self.defects += broke.outcome.is_risky

    def obstacle(self) -> str:
        """Why the rest cannot be had from another pod, as metrics have it; empty where it can."""
        if self.record is None:
            return "off"
        if self.said is None or not self.record.is_kept or not self.fields:
            return "size"
        if self.said.obstacle:
            return "answer"
        return "request" if self.said.finish or obstacle(self.fields, self.said) else ""

    def refused(self, answer: web.Response | None) -> None:
        """The last word of the engines that were asked for the rest, if there is one."""
        if self.said is not None and answer is not None and is_complete(answer.body):
            self.said.is_full = True

    def ending(self, inbound: Inbound) -> bytes | None:
        """The events that are missing, where no token is."""
        if self.said is None or not self.fields or self.said.obstacle:
            return None
        return ending(Endpoint(inbound.endpoint), self.fields, self.said, self.prompt_tokens)

    def ways(self, inbound: Inbound, pods: Sequence[Pod], avoided: Collection[PodId]) -> tuple[Way, set[PodId]] | None:
        """How to ask for the rest, and the pods that can be asked so; None where there is none."""
        assert self.said is not None
        found: dict[PodId, Way] = {}
        for pod in pods:
            if pod.pod_id not in avoided:
                card = next((model.card for model in pod.identity.models if model.name == inbound.model), b"{}")
                way = way_of(orjson.loads(card), Endpoint(inbound.endpoint), self.fields, self.said)
                if way is not None:
                    found[pod.pod_id] = way
        if not found:
            return None
        best = min(found.values(), key=lambda way: way.value)
        return best, {pod for pod, way in found.items() if way is best}

    def rest(self, inbound: Inbound, way: Way) -> Inbound:
        """The request for the rest. Its keys are those of the prompt: what follows is of use to nobody else."""
        assert self.said is not None
        self.rewriter = Rewriter(self.said, way, self.prompt_tokens)
        return replace(
            inbound,
            body=ask(Endpoint(inbound.endpoint), self.fields, self.said, way),
            prompt_tokens=inbound.prompt_tokens + self.said.made,
            output_tokens=max(1, inbound.output_tokens - self.said.made),
        )


class RestBody:
    """The body of an answer that goes on with another one, in the words of that."""

    def __init__(self, body: Source, first: bytes, rewriter: Rewriter) -> None:
        self._body = body
        self._first = first
        self._rewriter = rewriter

    @property
    def is_read(self) -> bool:
        """As of any body."""
        return not self._first and self._body.is_read

    async def readany(self) -> bytes:
        """As of any body."""
        while chunk := self._first or await self._body.readany():
            self._first = b""
            try:
                events = self._rewriter.feed(chunk)
            except ValueError as error:
                raise BrokeOff(str(error)) from None
            if events:
                return events
        return b""

    async def begin(self, deadline_s: float) -> bytes:
        """The first events that the client is to get. Raises PodFailed."""
        try:
            async with asyncio.timeout_at(deadline_s):
                chunk = await self.readany()
        except TimeoutError:
            raise PodFailed("timeout", DeadlineExceeded("the engine gave no answer in time")) from None
        except OSError as error:
            raise PodFailed("disconnect", BadGateway("the engine broke off its answer", str(error))) from None
        if not chunk:
            raise PodFailed("disconnect", BadGateway("the engine sent a stream without an event"))
        return chunk


def no_stream() -> PodFailed:
    """An engine that was asked for the rest of a stream sent something else."""
    return PodFailed("error", BadGateway("the engine gave no stream for the rest of one"), Outcome.UNABLE)
