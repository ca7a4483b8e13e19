"""A stream whose beginning the client has: what is needed to get its rest from another pod."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from engine.contract.requests import Endpoint
from router.continuing.continuations import Rewriter, Way
from router.continuing.record import Record
from router.continuing.resume import (
    MAX_BODY_BYTES,
    ask,
    ending,
    fields_of,
    is_complete,
    obstacle,
    path_of,
    rewriter_of,
    way_of,
)
from router.continuing.transcript import Said
from router.continuing.transcript_responses import ResponseSaid
from router.edge.errors import BadGateway, DeadlineExceeded
from router.engines.engine_client import BrokeOff
from router.engines.outcome import Outcome
from router.engines.upstream import PodFailed
from router.fleet.pod import Pod
from router.forwarding.relay import Relay, Source, UpstreamBroke
from router.reading.inbound import Inbound
from router.views.types import PodId


class Passed(web.StreamResponse):
    """An answer whose head goes out in one packet with the first bytes of the body."""

    _send_headers_immediately = False  # aiohttp's attribute; with its default the head is a packet of its own


@dataclass(slots=True)
class Begun:
    """One answer under way. `record` is None if no other pod may be asked for its rest."""

    response: web.StreamResponse
    writer: AbstractStreamWriter
    is_stream: bool
    record: Record | None
    relay: Relay | None = None
    """The last relay that copied a part of the answer."""
    broke: UpstreamBroke | None = None
    """The error that ended that relay."""
    defects: int = 0
    """Attempts in a row that broke at the same place in the answer: the request may be the cause."""
    prompt_tokens: int | None = None
    """The request's prompt tokens, as an engine counted them."""
    rewriter: Rewriter | None = None
    """The rewriter of the attempt that now produces the rest."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The request's fields, once its body had to be parsed again."""
    said: Said | None = None
    """All that the client had received at the last break."""
    _made_then: int = -1

    def stopped(self, broke: UpstreamBroke, relay: Relay, inbound: Inbound, prompt_tokens: int | None) -> None:
        """Record that a pod broke the stream or fell silent. `prompt_tokens`: as that pod counted, if it did."""
        self.broke, self.relay = broke, relay
        if self.prompt_tokens is None:
            self.prompt_tokens = prompt_tokens
        if self.record is None or not self.record.is_kept:
            return
        if not self.fields and len(inbound.body) <= MAX_BODY_BYTES:
            self.fields = fields_of(inbound.body)
        self.said = self.record.read()
        if self.said.made > self._made_then:
            self._made_then, self.defects = self.said.made, 0
        self.defects += broke.outcome.is_risky

    def obstacle(self, inbound: Inbound) -> str:
        """Return why no other pod can give the rest, as the label in the metrics; empty if one can."""
        if self.record is None:
            return "off"
        if inbound.only is not None:
            return "request"  # no other pod has the conversation, even if no token was sent yet
        if self.said is None or not self.record.is_kept or not self.fields:
            return "size"
        if self.said.obstacle:
            return "answer"
        return "request" if self.said.finish or obstacle(Endpoint(inbound.endpoint), self.fields, self.said) else ""

    @property
    def next_number(self) -> int:
        """The number of the next event if events are numbered and were read; else 0."""
        return self.said.number + 1 if isinstance(self.said, ResponseSaid) else 0

    def refused(self, answer: web.Response | None) -> None:
        """Note whether the engines refused to give the rest because the answer has all of its tokens.

        `answer`: the last error of the engines that were asked for the rest, if there is one.
        """
        if self.said is not None and answer is not None and is_complete(answer.body):
            self.said.is_full = True

    def ending(self, inbound: Inbound) -> bytes | None:
        """Return the closing events if only these are missing; None if tokens are missing too."""
        if self.said is None or not self.fields or self.said.obstacle:
            return None
        return ending(Endpoint(inbound.endpoint), self.fields, self.said, self.prompt_tokens)

    def ways(self, inbound: Inbound, pods: Sequence[Pod], avoided: Collection[PodId]) -> tuple[Way, set[PodId]] | None:
        """Return the best way to ask for the rest, and the pods that support it; None if there is no way."""
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
        """Return the request for the rest. Its keys cover the prompt alone: no other request shares what follows."""
        assert self.said is not None
        self.rewriter = rewriter_of(Endpoint(inbound.endpoint), self.said, way, self.prompt_tokens)
        return replace(
            inbound,
            endpoint=path_of(Endpoint(inbound.endpoint), way),
            body=ask(Endpoint(inbound.endpoint), self.fields, self.said, way),
            prompt_tokens=inbound.prompt_tokens + self.said.made,
            output_tokens=max(1, inbound.output_tokens - self.said.made),
        )


class RestBody:
    """The body of a second answer, rewritten so that it continues the first one."""

    def __init__(self, body: Source, first: bytes, rewriter: Rewriter) -> None:
        self._body = body
        self._first = first
        self._rewriter = rewriter

    @property
    def is_read(self) -> bool:
        """See Source."""
        return not self._first and self._body.is_read

    async def readany(self) -> bytes:
        """See Source."""
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
        """Return the first events for the client. Raises PodFailed."""
        try:
            async with asyncio.timeout_at(deadline_s):
                chunk = await self.readany()
        except TimeoutError:
            raise PodFailed("timeout", DeadlineExceeded("the engine did not answer in time")) from None
        except OSError as error:
            raise PodFailed("disconnect", BadGateway("the engine broke off its answer", str(error))) from None
        if not chunk:
            raise PodFailed("disconnect", BadGateway("the engine sent a stream without an event"))
        return chunk


def no_stream() -> PodFailed:
    """Return the error of an engine that was asked for the rest of a stream and sent no stream."""
    error = BadGateway("the engine was asked for the rest of a stream and did not send a stream")
    return PodFailed("error", error, Outcome.UNABLE)
