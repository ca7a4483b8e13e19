"""One request of a client, message by message from the proxy: the decision, and what is learnt from the answer.

Whatever the order of the messages and wherever they stop, `close` ends what was begun: no count is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import unquote

from aiohttp import web
from google.protobuf.struct_pb2 import Struct
from multidict import CIMultiDict

from engine.common.api_keys import authorization_of
from engine.common.log_lines import as_text
from engine.contract import headers
from engine.contract.errors import ApiError
from router.edge.admission import Admitted
from router.edge.client_keys import OPEN_PATHS, key_id_shown
from router.edge.errors import DeadlineExceeded, Forbidden, RequestTimeout, Unauthorized, error_response
from router.edge.headers import removed_at_proxy, request_id
from router.fleet.pod import Pod, TrackedRequest
from router.forwarding.exchange import Arrival, Exchange
from router.picker.answer import Answered
from router.picker.bodies import Body
from router.picker.destination import ByLoad, NoneAllowed, endpoint_of_pod, fallbacks, outside
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
from router.reading.client_paths import Found, Kind, UnknownPath, find
from router.reading.engine_fields import warning_of
from router.reading.inbound import Inbound
from router.tenants.limiter import Taking
from router.tenants.tenant import DEFAULT, Tenant

Responses = Sequence[wire.ProcessingResponse]

READ = frozenset((Kind.PREFIX, Kind.LOAD, Kind.PASSED))
"""Paths whose bodies decide where requests go."""
MAX_LOGGED_CHARS = 2**13
"""Longest path, and longest address of a client, in a log line. The gateway's own clients have the same bound."""
BUFFERED = (wire.BUFFERED, wire.BUFFERED_PARTIAL)
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
        self._target = ""
        self._found: Found | None = None
        """The request's entry in the list of what clients may use. Without one, no engine gets the request."""
        self._request_mode = self._response_mode = int(wire.FULL_DUPLEX_STREAMED)
        self._allowed: frozenset[str] | None = None
        self._body: Body | None = None
        """None once it has been sent on."""
        self._tracked: TrackedRequest | None = None
        """Counts a request without keys on its pod; requests with keys have attempts."""
        self._answered: Answered | None = None

    async def answer(self, message: wire.ProcessingRequest) -> Responses:
        """Return what to tell the proxy. Raises ProtocolError."""
        part = message.WhichOneof("request")
        if part is None:
            raise ProtocolError("a message without a part of a request")
        if message.observability_mode:
            raise ProtocolError("observability_mode leaves no room for a decision: switch it off")
        if self._exchange is None and part == "response_headers":
            self.is_over = True  # the proxy answers a request that it refuses before it asks
            return [wire.ProcessingResponse(response_headers=wire.HeadersResponse())]
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
        answered, parts, found = self._answered, self._parts, self._found
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
        if self._tracked is not None:
            self._tracked.__exit__()
        if self._taking is not None:
            self._taking.used = exchange.tokens_used if self._tracked is None else self._tokens_by_load(exchange)
            await self._taking.__aexit__()
        if found is not None and found.kind is Kind.STORED:
            parts.stored.answered(self._fields[":method"], found.name, exchange.status)
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
        self._target = fields.get(":path", "")
        self._path = as_text(unquote(self._target.partition("?")[0]), MAX_LOGGED_CHARS)
        admitted = self._admitted = self._inside.enter_context(parts.admission.request())
        arrival = arrival._replace(tenant=self._admit(fields))
        arrival = arrival._replace(urgency=urgency_of(arrival.tenant, fields, parts))
        self._exchange = Exchange(arrival)
        found = self._found = self._find(fields)
        if found.kind is Kind.OWN:
            return [self._answer_itself(parts.own(found, arrival.tenant))]
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._allowed = subset_of(message.metadata_context)
        if parts.limits.takes_tests and (asked := selection_of(fields)) is not None:
            self._allowed = asked
        if found.kind is not Kind.STORED and arrival.tenant.limits is not None:  # before the body costs anything
            self._taking = await parts.limiter.take(arrival.tenant).__aenter__()
            self._exchange.limited(self._taking.headers())
        self._body = Body(admitted, parts.limits.max_body_bytes, fields.get("content-encoding"))
        if head.end_of_stream or self._request_mode not in WITH_BODY:
            return await self._by_load()
        self._until(min(now_s + parts.limits.body_s, deadline_s))
        if self._request_mode in BUFFERED:
            return [wire.ProcessingResponse(request_headers=wire.HeadersResponse())]
        return ()

    def _admit(self, fields: CIMultiDict[str]) -> Tenant:
        """Return the owner of the key that the request shows. Raises Unauthorized."""
        parts = self._parts
        if parts.keys is None or self._path in OPEN_PATHS:
            return DEFAULT
        try:
            return parts.keys.admit(authorization_of(fields))
        except Unauthorized as error:
            parts.on_refusal(error)
            raise

    def _find(self, fields: CIMultiDict[str]) -> Found:
        """Return what the request asks for, in the list of what clients may use. Raises UnknownPath."""
        limits = self._parts.limits
        try:
            found = find(fields.get(":method", ""), self._target, passes_through=limits.passes_through, has_prefix=True)
            if found.kind is Kind.CACHES:
                raise UnknownPath("named caches are served at the gateway's own port alone", code="unknown_path")
        except UnknownPath:
            self._parts.metrics.answers.unknown_path("picker")
            raise
        self._path = as_text(found.path, MAX_LOGGED_CHARS)
        return found

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
        found = self._found
        assert found is not None
        assert self._admitted is not None
        if found.kind is Kind.STORED:
            return self._go(*await self._bound(found), sent, is_end=is_end)
        if found.kind not in READ:
            return self._go(*await self._least_loaded(plain), sent, is_end=is_end)
        inbound = await self._parts.reading.read(
            found.path, found.path, self._fields, plain, exchange.arrival, self._admitted
        )
        exchange.asks(inbound)
        await self._charge(exchange, inbound.prompt_tokens + inbound.answer_tokens)
        pods = await self._choose(exchange, inbound)
        return self._go(pods[0], pods, inbound.body if inbound.body is not plain else sent, is_end=is_end)

    async def _bound(self, found: Found) -> tuple[Pod, Sequence[Pod]]:
        """Return the pod with the response that the path names, alone. It computes nothing, so no limit is charged."""
        exchange, query = self._exchange, self._target.partition("?")[2]
        assert exchange is not None
        method, tenant = self._fields[":method"], exchange.arrival.tenant
        inbound = await self._parts.stored.inbound(method, found.pattern, found.name, query, tenant)
        pods = await self._choose(exchange, exchange.asks(inbound))
        return pods[0], ()

    async def _choose(self, exchange: Exchange, inbound: Inbound) -> list[Pod]:
        """Return the pod of a new attempt, which counts from now on, then the pods for fallbacks."""
        parts = self._parts
        others = outside(parts.fleet.pods(inbound.model), self._allowed)  # if none is allowed, do not wait
        if inbound.only in others:
            raise NoneAllowed
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
        assert self._found is not None
        self._until(self._exchange.arrival.deadline_s)
        if self._found.kind is Kind.STORED:
            return self._go(*await self._bound(self._found), None, is_end=True)
        return self._go(*await self._least_loaded(b""), None, is_end=True)

    async def _least_loaded(self, body: bytes) -> tuple[Pod, Sequence[Pod]]:
        """Return the pod for a request without keys, which counts from now on, and all pods that may have it."""
        parts, exchange = self._parts, self._exchange
        assert exchange is not None
        assert self._found is not None
        by_load, tokens = ByLoad(parts.fleet), 1 + len(body) // 4
        tenant = exchange.arrival.tenant
        if tenant.is_isolated and self._found.kind is not Kind.UPLOAD:
            raise Forbidden(
                "the proxy must show bodies to the picker: without them it cannot keep this tenant's caches apart"
            )
        pod, able = by_load.pick(tenant, self._allowed)
        if self._taking is not None:
            await self._charge(exchange, tokens)
            pod, able = by_load.pick(tenant, self._allowed)  # it may have waited
        self._tracked = parts.fleet.track(
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
        assert self._found is not None  # else the engine would take the gateway's key for a path that is not listed
        attempt = exchange.last
        arrival = exchange.arrival
        trace = None if arrival.trace is None or attempt is None else arrival.trace.fields(attempt.span_id)
        fields, removed = parts.upstream.changes(
            arrival.engine_request_id,
            pod,
            (None if attempt is None else attempt.session_id) or arrival.engine_session,
            trace,
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
        if exchange.inbound is not None and exchange.inbound.dropped:
            fields[headers.WARNING] = warning_of(exchange.inbound.dropped)
        sent = fields_of(head.headers)
        removed = removed_at_proxy(sent, tells_cache=self._tells_cache(exchange)) - set(map(str.lower, fields))
        common = wire.CommonResponse(header_mutation=mutation(fields.items(), sorted(removed)))
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
        return _immediate(
            error_response(error, exchange.arrival.request_id, rate_headers=exchange.rate_headers, path=self._path)
        )

    def _answer_itself(self, response: web.Response) -> wire.ProcessingResponse:
        """Return the gateway's own answer in place of an engine's."""
        assert self._exchange is not None
        self.is_over = True
        self._exchange.answered(response.status)
        response.headers[headers.REQUEST_ID] = self._exchange.arrival.request_id
        return _immediate(response)


def _immediate(response: web.Response) -> wire.ProcessingResponse:
    """Return a message that makes the proxy answer with `response`."""
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
