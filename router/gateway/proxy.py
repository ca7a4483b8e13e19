"""Forward a request to a pod and its answer to the client; try another pod while the client has seen nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Set
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from engine.contract import headers
from engine.contract.errors import ApiError, Unavailable
from router.fleet.faults import Fault
from router.fleet.fleet import Fleet
from router.gateway.chooser import Choice, Chooser
from router.gateway.error_events import engine_error
from router.gateway.errors import BadGateway
from router.gateway.exchange import CLIENT_GONE, Exchange
from router.gateway.headers import UpstreamHeaders, answer_headers
from router.gateway.inbound import Inbound
from router.gateway.relay import ClientStalled, EventRelay, UpstreamBroke, send_whole
from router.gateway.upstream import Opened, PodFailed, open_answer
from router.gateway.usage import Tail, header_usage, whole_usage
from router.routing.types import PodId
from router.telemetry.metrics import Metrics

WHOLE_ATTEMPT_SHARE = 0.5
"""Of the request's time that is left, for an answer that is no stream while another pod may still be tried."""
MAX_DEFECTS = 2
"""Pods that may break over one request. Of two it is likely the request that breaks them: it is spread no further."""
TELLING_BYTES = 4096
"""At the end of a body, which tell requests apart."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, and how many further pods to try."""

    first_byte_s: float
    idle_s: float
    retries: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt of which the client has seen nothing. `answer`: the engine's own error, if it gave one.

    `is_defect`: by the pod's fault, unless it is the request's; `is_risky`: it may be, as it was not refused unread.
    """

    reason: str
    error: ApiError
    answer: web.Response | None = None
    is_defect: bool = False
    is_risky: bool = False


class Proxy:
    """The way of a request through the fleet."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstream: UpstreamHeaders,
        fleet: Fleet,
        chooser: Chooser,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self._session = session
        self._upstream = upstream
        self._fleet = fleet
        self._chooser = chooser
        self._metrics = metrics
        self._limits = limits
        self._clock = asyncio.get_running_loop().time

    async def forward(self, request: web.Request, exchange: Exchange, inbound: Inbound) -> web.StreamResponse:
        """The answer, already sent where it is a stream. Raises ApiError when there is none to pass on."""
        try:
            return await self._forward(request, exchange, inbound)
        finally:
            self._settle(exchange)  # where the client has left between two attempts

    async def _forward(self, request: web.Request, exchange: Exchange, inbound: Inbound) -> web.StreamResponse:
        excluded: set[PodId] = set()
        answer: web.Response | None = None
        failure: Failure | None = None
        defects = 0
        while exchange.attempts <= self._limits.retries:
            try:
                choice = self._chooser.choose(inbound, self._to_avoid(inbound, excluded))
            except Unavailable:
                if failure is None:
                    raise
                break
            exchange.attempts += 1
            excluded.add(choice.pod.pod_id)
            until_s = self._attempt_deadline_s(exchange, inbound, excluded)
            result = await self._attempt(request, exchange, inbound, choice, until_s)
            if isinstance(result, web.Response):
                return await self._send_whole(request, exchange, result)
            if not isinstance(result, Failure):
                return result
            failure = result
            answer = failure.answer or answer
            exchange.error = failure.error.message
            self._metrics.retried(failure.reason)
            if failure.is_defect:
                choice.pod.faults.is_suspect = True
                exchange.faults.append((choice.pod, self._fault(exchange, inbound)))
            defects += failure.is_risky
            if defects == MAX_DEFECTS or self._clock() >= exchange.deadline_s:
                break
        self._settle(exchange)
        if answer is not None:
            return await self._send_whole(request, exchange, answer)
        assert failure is not None
        raise failure.error

    def _to_avoid(self, inbound: Inbound, tried: Set[PodId]) -> Set[PodId]:
        """Pods that `tried` it, and for a further attempt those in doubt, unless there is no other.

        So with several broken pods a request meets two of them at most once for each: then all but one are in doubt.
        """
        if not tried:
            return tried
        avoided = tried | self._fleet.doubtful(inbound.model)
        return avoided if any(pod.pod_id not in avoided for pod in self._fleet.pods(inbound.model)) else tried

    def _fault(self, exchange: Exchange, inbound: Inbound) -> Fault:
        """The present attempt as a failure of its pod."""
        return Fault(hash(inbound.body[-TELLING_BYTES:]), exchange.sent_s, self._clock())

    def _settle(self, exchange: Exchange, *, is_made_good: bool = False) -> None:
        """Blame the pod that failed the request; of several none: then it is the request. `is_made_good`: see Fault."""
        if len(exchange.faults) == 1:
            ((pod, fault),) = exchange.faults
            self._fleet.blame(pod, replace(fault, is_made_good=is_made_good), is_begun=False)
        exchange.faults.clear()

    def _attempt_deadline_s(self, exchange: Exchange, inbound: Inbound, tried: Collection[PodId]) -> float:
        """When an attempt is given up: it begins to answer by then, or has answered where the answer is no stream.

        Of a whole answer nothing is seen while it is made, so a pod that hangs looks like one that is busy. It must not
        take the time of all attempts; half of it leaves room for a long answer here and for one elsewhere.
        """
        now_s = self._clock()
        if inbound.stream:
            return min(exchange.deadline_s, now_s + self._limits.first_byte_s)
        may_go_on = exchange.attempts <= self._limits.retries
        if may_go_on and any(pod.pod_id not in tried for pod in self._fleet.pods(inbound.model)):
            return now_s + WHOLE_ATTEMPT_SHARE * (exchange.deadline_s - now_s)
        return exchange.deadline_s

    async def _attempt(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, choice: Choice, until_s: float
    ) -> web.StreamResponse | Failure:
        """One attempt, counted on its pod while it lasts; one that comes to nothing is undone in the index."""
        exchange.choice, exchange.sent_s = choice, self._clock()
        opened: Opened | None = None
        has_run = False
        try:
            with self._fleet.lease(
                choice.pod,
                prompt_tokens=inbound.prompt_tokens,
                uncached_tokens=max(0, inbound.prompt_tokens - choice.cached_tokens),
                output_tokens=inbound.output_tokens,
                streams=inbound.stream and inbound.prompts == 1,  # of several, most wait beyond its first byte
            ) as lease:
                opened = await open_answer(
                    self._session,
                    choice.pod.targets[inbound.endpoint],
                    inbound.body,
                    self._upstream.of(request.headers, exchange.request_id),
                    until_s,
                )
                if opened.is_retryable:
                    error = BadGateway(f"pod {choice.pod.pod_id} answered {opened.response.status}")
                    return self._failure("status", error, opened, choice, _whole_answer(opened, exchange, choice))
                now_s = exchange.first_byte_s = self._clock()
                has_run = opened.has_run
                if not has_run:
                    exchange.faults.clear()  # the request is wrong: no pod is to blame
                    return _whole_answer(opened, exchange, choice)
                choice.pod.faults.began(now_s)
                self._settle(exchange, is_made_good=True)
                if inbound.prompts == 1:  # the headers of a stream know nothing yet of other prompts
                    exchange.usage = header_usage(opened.response.headers)
                    lease.first_token(exchange.usage.cached_tokens)
                if opened.is_stream:
                    return await self._stream(request, exchange, inbound, choice, opened)
                self._fleet.served(choice.pod, sent_s=exchange.sent_s)
                exchange.usage = whole_usage(opened.first).or_else(exchange.usage)
                return _whole_answer(opened, exchange, choice)
        except PodFailed as failed:
            if failed.is_down:
                self._fleet.failed(choice.pod, str(failed))
            return self._failure(failed.reason, failed.error, failed, choice)
        finally:
            if opened is not None:
                opened.close()
            if not has_run:
                self._chooser.undo(inbound, choice)

    def _failure(
        self,
        reason: str,
        error: ApiError,
        cause: Opened | PodFailed,
        choice: Choice,
        answer: web.Response | None = None,
    ) -> Failure:
        """An attempt that `cause` ended. Who refuses one request while it answers others is full, not broken."""
        is_full = cause.is_refusal and choice.pod.faults.is_at_work(self._clock())
        return Failure(
            reason,
            error,
            answer,
            is_defect=cause.is_defect and not is_full,
            is_risky=cause.is_defect and not cause.is_refusal,
        )

    async def _stream(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, choice: Choice, opened: Opened
    ) -> web.StreamResponse:
        """Send the stream. From here on nothing is retried: the client sees the head."""
        response = web.StreamResponse(
            status=opened.response.status, headers=_headers(opened.response, exchange, choice)
        )
        tail = Tail()
        is_ended = False
        try:
            writer = await response.prepare(request)
            assert writer is not None  # only a HEAD request has none
            relay = EventRelay(
                opened.response.content, writer, tail, idle_s=self._limits.idle_s, deadline_s=exchange.deadline_s
            )
            try:
                await relay.copy(opened.first)
            except UpstreamBroke as error:
                exchange.error = str(error)
                if error.is_defect:
                    self._fleet.blame(choice.pod, self._fault(exchange, inbound), is_begun=True)
                self._metrics.broke()
                response.force_close()
                await relay.end_with(BadGateway(f"{error} (pod {choice.pod.pod_id})"))
                # No last chunk: nobody takes the stream for whole, and no client puts the connection back in its pool.
                if request.transport is not None:
                    request.transport.close()
            else:
                said = engine_error(tail.last_bytes())
                if said is None:
                    self._fleet.served(choice.pod, sent_s=exchange.sent_s)
                else:
                    exchange.error = said.message
                    self._fleet.blame(choice.pod, self._fault(exchange, inbound), is_begun=True)
                await response.write_eof()
            is_ended = True
        except (ClientStalled, ConnectionError) as error:
            exchange.error = f"client gone: {type(error).__name__}"
            exchange.status = CLIENT_GONE
        finally:
            exchange.usage = tail.usage().or_else(exchange.usage)
            if not is_ended and request.transport is not None:
                request.transport.abort()  # so that nothing can end the stream as if it were whole
        return response

    async def _send_whole(self, request: web.Request, exchange: Exchange, answer: web.Response) -> web.StreamResponse:
        """Send an answer that is here already; its pod is done with it."""
        try:
            await send_whole(request, answer, idle_s=self._limits.idle_s, deadline_s=exchange.deadline_s)
        except (ClientStalled, ConnectionError) as error:
            exchange.error = f"client gone: {type(error).__name__}"
            exchange.status = CLIENT_GONE
            if request.transport is not None:
                request.transport.abort()
        return answer


def _whole_answer(opened: Opened, exchange: Exchange, choice: Choice) -> web.Response:
    return web.Response(
        status=opened.response.status, body=opened.first, headers=_headers(opened.response, exchange, choice)
    )


def _headers(upstream: aiohttp.ClientResponse, exchange: Exchange, choice: Choice) -> CIMultiDict[str]:
    """The engine's headers, and why the request went there."""
    passed = answer_headers(upstream.headers)
    passed[headers.POD] = choice.pod.pod_id
    passed[headers.POLICY] = choice.policy
    passed[headers.PREDICTED_CACHED] = str(choice.cached_tokens)
    passed[headers.REQUEST_ID] = exchange.request_id
    return passed
