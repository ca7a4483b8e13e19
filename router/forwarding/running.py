"""A request while the gateway handles it: what it is, what became of it so far, and how it goes on.

UNANSWERED -- a pod begins to answer --> Streaming --> Over
Streaming -- its pod breaks it --> Interrupted -- another pod gives the rest --> Streaming
UNANSWERED -- a whole answer --> Over        Interrupted -- nobody gives the rest --> Over
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from engine.contract.bounded_json import loads
from engine.contract.requests import Endpoint
from router.continuing.continuations import Continuation, Rewriter
from router.continuing.resume import (
    MAX_BODY_BYTES,
    ask,
    continuation_of,
    ending,
    fields_of,
    is_complete,
    obstacle,
    path_of,
    rewriter_of,
)
from router.continuing.transcript import ResponseTranscript, SentEvents, Transcript
from router.edge.admission import Admitted
from router.edge.connection_limits import leaving_fifo
from router.engines.engine_client import Body, BrokeOff
from router.engines.stream_reader import StreamFailed, StreamReader, beginning
from router.engines.upstream import pod_failed
from router.fleet.pod import Pod
from router.forwarding.exchange import Exchange
from router.forwarding.relay import Relay, StreamBroke
from router.reading.inbound import Inbound
from router.views.types import PodId


class Passed(web.StreamResponse):
    """An answer whose head goes out in one packet with the first bytes of the body."""

    _send_headers_immediately = False  # aiohttp's attribute; with its default the head is a packet of its own


@dataclass(slots=True)
class PartialStream:
    """One answer under way. `sent` is None if no other pod may be asked for its rest."""

    response: web.StreamResponse
    writer: AbstractStreamWriter
    is_stream: bool
    sent: SentEvents | None


@dataclass(slots=True)
class Rest:
    """What is asked of another pod: the request for the rest, and how its events become those of the first answer."""

    inbound: Inbound
    rewriter: Rewriter


@dataclass(slots=True)
class Interrupted:
    """A stream that its pod broke or that fell silent."""

    stream: PartialStream
    broke: StreamBroke
    relay: Relay
    """The relay that copied the last part of the answer."""
    transcript: Transcript | None
    """All that the client has received; None if it is not kept."""
    fields: dict[str, Any]
    """The request's fields; empty if its body is too large to be parsed again."""
    prompt_tokens: int | None
    """The request's prompt tokens, as an engine counted them."""
    made: int
    """Tokens that the client has."""
    defects: int
    """Attempts in a row that broke at this place in the answer: the request may be the cause."""

    def obstacle(self, inbound: Inbound) -> str:
        """Return why no other pod can give the rest, as the label in the metrics; empty if one can."""
        if self.stream.sent is None:
            return "off"
        if inbound.only is not None:
            return "request"  # no other pod has the conversation, even if no token was sent yet
        if self.transcript is None or not self.fields:
            return "size"
        if self.transcript.obstacle:
            return "answer"
        is_obstacle = self.transcript.finish or obstacle(Endpoint(inbound.endpoint), self.fields, self.transcript)
        return "request" if is_obstacle else ""

    @property
    def next_number(self) -> int:
        """The number of the next event if events are numbered and were read; else 0."""
        return self.transcript.number + 1 if isinstance(self.transcript, ResponseTranscript) else 0

    def refused(self, answer: web.Response | None) -> None:
        """Note whether the engines refused to give the rest because the answer has all of its tokens.

        `answer`: the last error of the engines that were asked for the rest, if there is one.
        """
        if self.transcript is not None and answer is not None and is_complete(answer.body):
            self.transcript.is_full = True

    def ending(self, inbound: Inbound) -> bytes | None:
        """Return the closing events if only these are missing; None if tokens are missing too."""
        if self.transcript is None or not self.fields or self.transcript.obstacle:
            return None
        return ending(Endpoint(inbound.endpoint), self.fields, self.transcript, self.prompt_tokens)

    def continuation(
        self, inbound: Inbound, pods: Sequence[Pod], avoided: Collection[PodId]
    ) -> tuple[Continuation, set[PodId]] | None:
        """Return the best way to ask for the rest, and the pods that support it; None if there is no way."""
        assert self.transcript is not None
        found: dict[PodId, Continuation] = {}
        for pod in pods:
            if pod.pod_id not in avoided:
                card = next((model.card for model in pod.identity.models if model.name == inbound.model), b"{}")
                continuation = continuation_of(loads(card), Endpoint(inbound.endpoint), self.fields, self.transcript)
                if continuation is not None:
                    found[pod.pod_id] = continuation
        if not found:
            return None
        best = min(found.values(), key=lambda continuation: continuation.value)
        return best, {pod for pod, continuation in found.items() if continuation is best}

    def rest(self, inbound: Inbound, continuation: Continuation) -> Rest:
        """Return what is asked for the rest. Its keys cover the prompt alone: no other request shares what follows."""
        assert self.transcript is not None
        endpoint = Endpoint(inbound.endpoint)
        asked = replace(
            inbound,
            endpoint=path_of(endpoint, continuation),
            is_rest=True,
            body=ask(endpoint, self.fields, self.transcript, continuation),
            prompt_tokens=inbound.prompt_tokens + self.transcript.made,
            output_tokens=max(1, inbound.output_tokens - self.transcript.made),
        )
        return Rest(asked, rewriter_of(endpoint, self.transcript, continuation, self.prompt_tokens))


class Unanswered(Enum):
    """The client has nothing of an answer, and pods are asked."""

    UNANSWERED = auto()


UNANSWERED = Unanswered.UNANSWERED


@dataclass(slots=True)
class Streaming:
    """The client has the head of an answer, and a pod gives the body."""

    stream: PartialStream


@dataclass(slots=True)
class Over:
    """The client has all that it will get."""

    response: web.StreamResponse


State = Unanswered | Streaming | Interrupted | Over


class Running:
    """One request."""

    __slots__ = ("admitted", "exchange", "inbound", "request", "state")

    def __init__(self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted) -> None:
        self.request = request
        self.exchange = exchange
        self.inbound = inbound
        self.admitted = admitted
        self.state: State = UNANSWERED

    def leaving_fifo(self) -> Callable[[], None]:
        """Return a function that gives back the connection's place among the requests that are read."""
        return leaving_fifo(self.request)

    def client_left(self, error: Exception, response: web.StreamResponse) -> None:
        """End the request, because the client takes no more of `response`."""
        self.exchange.client_left(error)
        self.cut()
        self.state = Over(response)

    def cut(self) -> None:
        """Cut the client's connection, so that nothing can end the answer as if it were complete."""
        if self.request.transport is not None:
            self.request.transport.abort()


def interrupted(
    stream: PartialStream,
    broke: StreamBroke,
    relay: Relay,
    inbound: Inbound,
    prompt_tokens: int | None,
    before: Interrupted | None,
    *,
    is_risky: bool,
) -> Interrupted:
    """Return the state of a stream that broke. `prompt_tokens`: as the last pod counted, if it did. `before`: how it
    broke the time before. `is_risky`: the request may be the cause."""
    fields: dict[str, Any] = {}
    transcript, made, defects = None, -1, 0
    if before is not None:
        fields, made, defects = before.fields, before.made, before.defects
        prompt_tokens = prompt_tokens if before.prompt_tokens is None else before.prompt_tokens
    if stream.sent is not None and stream.sent.is_kept:
        if not fields and len(inbound.body) <= MAX_BODY_BYTES:
            fields = fields_of(inbound.body)
        transcript = stream.sent.read()
        if transcript.made > made:
            made, defects = transcript.made, 0
        defects += is_risky
        if not stream.sent.is_kept:  # an event without an end
            transcript = None
    return Interrupted(stream, broke, relay, transcript, fields, prompt_tokens, made, defects)


class RestBody:
    """The body of a second answer, rewritten so that it continues the first one."""

    def __init__(self, body: Body, first: bytes, rewriter: Rewriter) -> None:
        self._body = body
        self._first = first
        self._rewriter = rewriter

    @property
    def is_read(self) -> bool:
        """See Body."""
        return not self._first and self._body.is_read

    async def readany(self) -> bytes:
        """See Body."""
        while chunk := self._first or await self._body.readany():
            self._first = b""
            try:
                events = self._rewriter.feed(chunk)
            except ValueError as error:
                raise BrokeOff(str(error)) from None
            if events:
                return events
        return b""

    async def begin(self, reader: StreamReader, deadline_s: float, authority: str) -> bytes:
        """Return the first events for the client, up to the first token. `reader`: reads them. Raises PodFailed."""
        try:
            async with asyncio.timeout_at(deadline_s):
                return await beginning(self, reader)
        except (OSError, StreamFailed) as cause:
            raise pod_failed(cause, authority) from None
