"""One request of a client, message by message from the proxy: the decision, and what is learnt from the answer.

Whatever the order of the messages and wherever they stop, `close` ends what was begun: no count is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import unquote

from google.protobuf.struct_pb2 import Struct
from multidict import CIMultiDict

from engine.common.api_keys import authorization_of
from engine.common.log_lines import as_text
from engine.contract import headers
from engine.contract.errors import ApiError
from router.edge.admission import Admitted
from router.edge.client_keys import key_id_shown
from router.edge.errors import OPERATORS_PATHS, DeadlineExceeded, RequestTimeout, Unauthorized, error_response
from router.edge.headers import CACHE_FACTS, request_id
from router.endpoints.intake import KEYED
from router.fleet.pod import Lease, Pod
from router.forwarding.candidates import NoSuchPath
from router.forwarding.exchange import Arrival, Exchange
from router.picker.answer import Answered
from router.picker.bodies import Body
from router.picker.destination import ByLoad, endpoint_of_pod, fallbacks, outside
from router.picker.parts import PickerParts
from router.picker.protocol import (
    DESTINATION,
    TEST_SERVED,
    ProtocolError,
    chunks,
    destination,
    fields_of,
    mutation,
    selection_of,
    served_of,
    streamed,
    subset_of,
)
from router.picker.urgency import urgency_of
from router.picker.wire import picker_pb2 as wire
from router.reading.by_load import BY_LOAD, CLOSED
from router.reading.inbound import Inbound
from router.tenants.limiter import Taking

Responses = Sequence[wire.ProcessingResponse]

READ = frozenset(KEYED).union(BY_LOAD)
"""Paths whose bodies decide where requests go."""
NOT_FOR_CLIENTS = CLOSED | OPERATORS_PATHS
"""Paths that change an engine if they are POSTed to. The engine would take the gateway's key for it."""
MAX_LOGGED_CHARS = 2**13
"""Longest path, and longest address of a client, in a log line. The gateway's own clients have the same bound."""
BUFFERED = (wire.BUFFERED, wire.BUFFERED_PARTIAL)
_TOLD_OF_CACHES = CACHE_FACTS | {headers.POD}
WITH_BODY = (wire.FULL_DUPLEX_STREAMED, *BUFFERED)
"""Modes that bring a request's body before its headers go on. Without the body, nothing is known of the prompt's
prefix."""


class Call:
    """`answer` each message of the proxy, then `close` in any case."""

    def __init__(self, parts: PickerParts) -> None:
        self._parts = parts
        self._clock = asyncio.get_running_loop().time
        self.deadline_s = self._clock() + parts.limits.body_s
        """Deadline for the next message, by the loop's clock."""
        self.timeout: asyncio.Timeout | None = None
        """Set to `deadline_s` whenever that changes."""
        self.is_over = False
        """Whether the proxy needs no further answer."""
        self._exchange: Exchange | None = None
        self._admitted: Admitted | None = None
        self._inside = contextlib.ExitStack()
        self._taking: Taking | None = None
        self._fields: CIMultiDict[str] = CIMultiDict()
        self._path = ""
        self._request_mode = self._response_mode = int(wire.FULL_DUPLEX_STREAMED)
        self._allowed: frozenset[str] | None = None
        self._body: Body | None = None
        """None once it has been sent on."""
        self._lease: Lease | None = None
        """Counts a request without keys on its pod; requests with keys have attempts."""
        self._answered: Answered | None = None

    async def answer(self, message: wire.ProcessingRequest) -> Responses:
        """Return what to tell the proxy. Raises ProtocolError."""
        part = message.WhichOneof("request")
        if part is None:
            raise ProtocolError("a message without a part of a request")
        if message.observability_mode:
            raise ProtocolError("observability_mode leaves no room for a decision: switch it off")
        if (self._exchange is None) is not (part == "request_headers"):
            raise ProtocolError(f"{part} out of order")
        if part.startswith("response") and self._body is not None:
            raise ProtocolError(f"{part} before the end of the request")
        try:
            return await _HANDLERS[part](self, message)
        except ApiError as error:
            return [self._refused(error)]

    def late(self) -> Responses:
        """Return what to tell the proxy when the deadline is over; nothing if the client's answer has begun."""
        exchange, limits = self._exchange, self._parts.limits
        if exchange is None:
            return ()
        if self._body is not None and self._clock() < exchange.arrival.deadline_s:
            text = f"the request's body did not arrive in time: it has {limits.body_s:g} s"
            return [self._refused(RequestTimeout(text))]
        error = DeadlineExceeded(f"the request took longer than {limits.total_s:g} s")
        refusal = self._refused(error)
        return () if self._answered is not None else [refusal]

    async def close(self) -> None:
        """End all that was begun, because the proxy's stream of messages is over."""
        exchange = self._exchange
        if exchange is None:
            return
        self._exchange = None
        answered, parts = self._answered, self._parts
        if answered is not None and not self._sees_body:
            answered.ended()  # the proxy does not say how the answer ended
        if not exchange.status:
            exchange.client_left()
        if answered is not None:
            answered.close()
        elif exchange.attempts:
            last = exchange.attempts[-1]
            last.__exit__()
            parts.accounting.undo(last)
        if self._lease is not None:
            self._lease.__exit__()
        if self._taking is not None:
            self._taking.used = exchange.tokens_used if self._lease is None else self._tokens_by_load(exchange)
            await self._taking.__aexit__()
        self._inside.close()
        parts.recorder.ended(exchange, self._path, self._who)

    # -- the request --------------------------------------------------------------------------------------------

    async def _request_headers(self, message: wire.ProcessingRequest) -> Responses:
        parts, head, now_s = self._parts, message.request_headers, self._clock()
        fields = self._fields = fields_of(head.headers)
        trace = None if parts.tracer is None else parts.tracer.begin(fields)
        session, deadline_s = fields.get(headers.SESSION), now_s + parts.limits.total_s
        arrival = Arrival(request_id(fields), now_s, deadline_s, client_session=session, trace=trace)
        self._exchange = Exchange(arrival)  # a refusal is recorded here, before the tenant is known
        # Engines decode a path before they look it up, so `/v1/completion%73` is a request for completions.
        self._path = as_text(unquote(fields.get(":path", "").partition("?")[0]), MAX_LOGGED_CHARS)
        admitted = self._admitted = self._inside.enter_context(parts.admission.request())
        tenant = arrival.tenant
        if parts.keys is not None:
            try:
                tenant = parts.keys.admit(authorization_of(fields))
            except Unauthorized as error:
                parts.on_refusal(error)
                raise
        arrival = arrival._replace(tenant=tenant, urgency=urgency_of(tenant, fields, parts))
        self._exchange = Exchange(arrival)
        if fields.get(":method") == "POST" and self._path.rstrip("/") in NOT_FOR_CLIENTS:
            raise NoSuchPath(f"{self._path} is for operators, not for clients", code="unknown_path")
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._allowed = subset_of(message.metadata_context)
        if parts.limits.takes_tests and (asked := selection_of(fields)) is not None:
            self._allowed = asked
        if fields.get(":method") == "POST" and tenant.limits is not None:  # before the body costs anything
            self._taking = await parts.limiter.take(tenant).__aenter__()
            self._exchange.limited(self._taking.headers())
        self._body = Body(admitted, parts.limits.max_body_bytes, fields.get("content-encoding"))
        if head.end_of_stream or self._request_mode not in WITH_BODY:
            return await self._by_load()
        self._until(min(now_s + parts.limits.body_s, deadline_s))
        if self._request_mode in BUFFERED:
            return [wire.ProcessingResponse(request_headers=wire.HeadersResponse())]
        return ()

    async def _request_body(self, message: wire.ProcessingRequest) -> Responses:
        chunk = message.request_body
        if self._body is None:
            if self._request_mode in WITH_BODY or self._answered is not None:
                raise ProtocolError("request_body after the end of the request")
            return [wire.ProcessingResponse(request_body=wire.BodyResponse())]
        self._body.add(chunk.body)
        if self._request_mode == wire.BUFFERED_PARTIAL and not chunk.end_of_stream:
            return await self._by_load()
        if self._request_mode in BUFFERED or chunk.end_of_stream:
            return await self._decide(is_end=chunk.end_of_stream)
        return ()

    async def _request_trailers(self, message: wire.ProcessingRequest) -> Responses:
        if self._answered is not None:
            raise ProtocolError("request_trailers after the end of the request")
        decided = await self._decide(is_end=False) if self._body is not None else ()
        if self.is_over:
            return decided
        return [*decided, wire.ProcessingResponse(request_trailers=wire.TrailersResponse())]

    async def _decide(self, *, is_end: bool) -> Responses:
        """Choose by the body, which has come whole."""
        exchange = self._exchange
        assert self._body is not None
        assert exchange is not None
        self._until(exchange.arrival.deadline_s)
        plain, sent = await self._body.plain(), self._body.sent()
        if self._fields.get(":method") != "POST" or self._path not in READ:
            return self._go(*await self._least_loaded(plain), sent, is_end=is_end)
        raw_path = self._fields.get(":path", "").partition("?")[0]
        assert self._admitted is not None
        inbound = await self._parts.reading.read(
            self._path, raw_path, self._fields, plain, exchange.arrival, self._admitted
        )
        exchange.asks(inbound)
        pods = await self._choose(exchange, inbound)
        return self._go(pods[0], pods, inbound.body if inbound.body is not plain else sent, is_end=is_end)

    async def _choose(self, exchange: Exchange, inbound: Inbound) -> list[Pod]:
        """Return the pod of a new attempt, which counts from now on, then the pods for fallbacks."""
        parts = self._parts
        await self._charge(exchange, inbound.prompt_tokens + inbound.answer_tokens)
        outside(parts.fleet.pods(inbound.model), self._allowed)  # if none is allowed, do not wait
        full = await parts.candidates.place(inbound, exchange)
        pods = parts.fleet.pods(inbound.model)
        others = outside(pods, self._allowed)
        avoided = others | full
        if all(pod.pod_id in avoided for pod in pods):
            avoided = others
        choice = parts.chooser.choose(inbound, avoided)
        attempt = parts.attempts.begin(exchange, inbound, choice)
        attempt.__enter__()
        return [choice.pod, *(pod for pod in pods if pod.pod_id not in avoided)]

    async def _charge(self, exchange: Exchange, tokens: int) -> None:
        """Charge the tenant's limits with the tokens of a request. Raises RateLimited."""
        if self._taking is not None:
            await self._taking.needs(tokens)
            exchange.limited(self._taking.headers())

    async def _by_load(self) -> Responses:
        """Choose without a body, or without the whole body."""
        assert self._body is not None
        assert self._exchange is not None
        self._until(self._exchange.arrival.deadline_s)
        return self._go(*await self._least_loaded(b""), None, is_end=True)

    async def _least_loaded(self, body: bytes) -> tuple[Pod, Sequence[Pod]]:
        """Return the pod for a request without keys, which counts from now on, and all pods that may have it.

        A POST may make an engine compute, so it needs the tenant's rights and is charged.
        """
        parts, exchange = self._parts, self._exchange
        assert exchange is not None
        by_load, tokens = ByLoad(parts.fleet, parts.room), 1 + len(body) // 4
        tenant = exchange.arrival.tenant if self._fields.get(":method") == "POST" else None
        pod, able = by_load.pick(body, tenant, self._allowed)
        if self._taking is not None:
            await self._charge(exchange, tokens)
            pod, able = by_load.pick(body, tenant, self._allowed)  # it may have waited
        self._lease = parts.fleet.lease(
            pod, prompt_tokens=tokens, uncached_tokens=tokens, output_tokens=1, streams=False
        ).__enter__()
        return pod, able

    def _tokens_by_load(self, exchange: Exchange) -> int | None:
        """Return the tokens that a request without keys took; None: use the estimate."""
        if self._answered is None or not self._answered.has_served:
            return 0
        usage = exchange.usage
        return None if usage.prompt_tokens is None else usage.prompt_tokens + (usage.completion_tokens or 0)

    def _go(self, pod: Pod, pods: Sequence[Pod], body: bytes | None, *, is_end: bool) -> Responses:
        """Tell the proxy where to go, and give it the body back."""
        parts, exchange = self._parts, self._exchange
        assert exchange is not None
        assert self._admitted is not None
        assert self._body is not None
        attempt = exchange.last
        arrival = exchange.arrival
        trace = None if arrival.trace is None or attempt is None else arrival.trace.fields(attempt.span_id)
        fields, removed = parts.upstream.changes(
            arrival.request_id, pod, None if attempt is None else attempt.session_id, trace
        )
        is_rewritten = body is not None and body is not self._body.sent()
        is_buffered = body is not None and self._request_mode in BUFFERED
        if is_rewritten:
            removed |= {"content-encoding"}
            if not is_buffered:
                fields["content-length"] = str(len(body or b""))
        further = [] if pod.rank is not None else fallbacks(pods, pod, parts.limits.fallbacks)
        endpoints = [endpoint_of_pod(pod), *further]
        fields[DESTINATION] = ",".join(endpoints)
        metadata: Struct = destination(endpoints)
        common = wire.CommonResponse(header_mutation=mutation(fields.items(), removed), clear_route_cache=True)
        if is_rewritten and is_buffered:
            common.body_mutation.body = body or b""
        self._body = None
        self._admitted.forget_body()
        exchange.forget_body()
        if is_buffered:
            return [wire.ProcessingResponse(request_body=wire.BodyResponse(response=common), dynamic_metadata=metadata)]
        first = wire.ProcessingResponse(
            request_headers=wire.HeadersResponse(response=common), dynamic_metadata=metadata
        )
        return [first] if body is None else [first, *chunks(body, is_end=is_end)]

    # -- the answer ---------------------------------------------------------------------------------------------

    @property
    def _sees_body(self) -> bool:
        return self._response_mode != wire.NONE

    async def _response_headers(self, message: wire.ProcessingRequest) -> Responses:
        if self._answered is not None:
            raise ProtocolError("response_headers a second time")
        parts, exchange, head = self._parts, self._exchange, message.response_headers
        assert exchange is not None
        served = served_of(message.metadata_context)
        answered = self._answered = Answered(parts, exchange, fields_of(head.headers), served)
        if head.end_of_stream:
            answered.ended()
        elif not self._sees_body:
            answered.began()
        fields = self._told(exchange, answered)
        if parts.limits.takes_tests and served is not None:
            fields[TEST_SERVED] = served
        removed = () if self._tells_cache(exchange) else _TOLD_OF_CACHES - fields.keys()
        common = wire.CommonResponse(header_mutation=mutation(fields.items(), removed))
        return [wire.ProcessingResponse(response_headers=wire.HeadersResponse(response=common))]

    def _told(self, exchange: Exchange, answered: Answered) -> dict[str, str]:
        """Return headers of the answer that say why the request went to its pod."""
        fields = {headers.REQUEST_ID: exchange.arrival.request_id, **exchange.rate_headers}
        if answered.attempt is not None and self._tells_cache(exchange):
            choice = answered.attempt.choice
            fields[headers.POD] = choice.pod.pod_id
            fields[headers.POLICY] = choice.policy
            fields[headers.PREDICTED_CACHED] = str(choice.cached_tokens)
        return fields

    def _tells_cache(self, exchange: Exchange) -> bool:
        return self._parts.limits.tells_cache and exchange.arrival.tenant.tells_cache

    async def _response_body(self, message: wire.ProcessingRequest) -> Responses:
        answered, chunk = self._answered, message.response_body
        if answered is None or answered.is_ended:
            raise ProtocolError("response_body out of order")
        answered.add(chunk.body)
        if chunk.end_of_stream:
            answered.ended()
        if self._response_mode == wire.FULL_DUPLEX_STREAMED:
            return [wire.ProcessingResponse(response_body=streamed(chunk.body, is_end=chunk.end_of_stream))]
        return [wire.ProcessingResponse(response_body=wire.BodyResponse())]

    async def _response_trailers(self, message: wire.ProcessingRequest) -> Responses:
        if self._answered is None:
            raise ProtocolError("response_trailers out of order")
        self._answered.ended()
        return [wire.ProcessingResponse(response_trailers=wire.TrailersResponse())]

    def _who(self) -> tuple[str | None, str]:
        """Return which key the request came with, and where it came from, if the proxy says so."""
        key_id = None if self._parts.keys is None else key_id_shown(authorization_of(self._fields))
        client = self._fields.get("x-forwarded-for", "").rpartition(",")[2].strip()
        return key_id, as_text(client, MAX_LOGGED_CHARS)

    # -- both -----------------------------------------------------------------------------------------------------

    def _until(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        if self.timeout is not None:
            self.timeout.reschedule(deadline_s)

    def _refused(self, error: ApiError) -> wire.ProcessingResponse:
        """Return the answer in place of an engine's."""
        parts, exchange = self._parts, self._exchange
        assert exchange is not None
        self.is_over = True
        parts.recorder.refused(exchange, error)
        response = error_response(
            error, exchange.arrival.request_id, rate_headers=exchange.rate_headers, path=self._path
        )
        assert isinstance(response.body, bytes)
        return wire.ProcessingResponse(
            immediate_response=wire.ImmediateResponse(
                status=wire.HttpStatus(code=response.status),
                headers=mutation((name.lower(), value) for name, value in response.headers.items()),
                body=response.body,
                details="warmroute",
            )
        )


_HANDLERS: Mapping[str, Callable[[Call, wire.ProcessingRequest], Awaitable[Responses]]] = {
    "request_headers": Call._request_headers,
    "request_body": Call._request_body,
    "request_trailers": Call._request_trailers,
    "response_headers": Call._response_headers,
    "response_body": Call._response_body,
    "response_trailers": Call._response_trailers,
}
