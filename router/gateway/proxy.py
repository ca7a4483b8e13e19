"""Forward a request to a pod and its answer to the client; try another pod while the client has seen nothing."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web
from multidict import CIMultiDict

from engine.contract import headers
from engine.contract.errors import TooManyRequests, Unavailable
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.requests import Endpoint
from router.fleet.fleet import Fleet
from router.gateway.admission import Admitted
from router.gateway.attempt import Attempt
from router.gateway.begun import Begun, Passed, RestBody, no_stream
from router.gateway.blame import Blame
from router.gateway.chooser import Choice, Chooser
from router.gateway.conversations import Conversations
from router.gateway.door import leave_gate
from router.gateway.engine_client import Answer, EngineClient
from router.gateway.exchange import Exchange
from router.gateway.headers import UpstreamHeaders, answer_headers
from router.gateway.hedge import Hedges, Race, Steps
from router.gateway.inbound import Inbound
from router.gateway.limits import Limits
from router.gateway.outcome import Outcome
from router.gateway.reach import NoSuchPath, Reach, is_unknown_path
from router.gateway.relay import ClientStalled, Relay, Source, UpstreamBroke, send_whole
from router.gateway.resume import RESUMED, Way
from router.gateway.said import Record
from router.gateway.sessions import Sessions, restore
from router.gateway.upstream import Opened, PodFailed, failure_of, open_answer
from router.gateway.usage import Tail, header_usage, whole_usage
from router.gateway.waiting import WaitingRoom
from router.overload.retries import RetryBudget
from router.routing.types import PodId
from router.telemetry.metrics import Metrics

WHOLE_ATTEMPT_SHARE = 0.5
"""Of the request's time that is left, for an answer that is no stream while another pod may still be tried."""
MAX_DEFECTS = 2
"""Pods that may break over one request. Of two it is likely the request that breaks them: it is spread no further."""


class Proxy:
    """The way of a request through the fleet."""

    def __init__(
        self,
        client: EngineClient,
        upstream: UpstreamHeaders,
        fleet: Fleet,
        chooser: Chooser,
        room: WaitingRoom,
        metrics: Metrics,
        limits: Limits,
        sessions: Sessions,
        reach: Reach,
        conversations: Conversations,
    ) -> None:
        self._reach = reach
        self._conversations = conversations
        self._client = client
        self._upstream = upstream
        self._fleet = fleet
        self._chooser = chooser
        self._room = room
        self._blame = Blame(fleet, metrics)
        self._metrics = metrics
        self._limits = limits
        self._sessions = sessions
        self._inside = 0
        """Requests on their way through here."""
        self._retries = RetryBudget()
        self._hedges = Hedges(limits.hedge_after_s, fleet, chooser, room, metrics) if limits.hedge_after_s else None
        self._clock = asyncio.get_running_loop().time

    async def forward(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted
    ) -> web.StreamResponse:
        """The answer, which is sent. Raises ApiError when there is none to pass on."""
        self._inside += 1
        try:
            return await self._forward(request, exchange, inbound, admitted)
        finally:
            self._inside -= 1
            self._blame.settle(exchange)  # where the client has left between two attempts

    async def _forward(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted
    ) -> web.StreamResponse:
        attempts = exchange.attempts
        while exchange.spent <= self._limits.retries:
            if not attempts:
                choice = self._chooser.choose(inbound, await self._reach.place(request, inbound, exchange))
            else:
                again = await self._choose_again(request, exchange, inbound)
                if again is None:
                    break
                choice = again
                # A pod that only said that it leaves has done nothing: to go elsewhere then adds no load.
                is_on_budget = attempts[-1].outcome is not Outcome.LEAVING
                if is_on_budget and not self._retries.take(self._inside):
                    self._chooser.undo(inbound, choice)
                    self._metrics.retry_refused()
                    break
            attempt = self._begin(exchange, inbound, choice)
            attempt.is_on_budget = len(attempts) > 1 and is_on_budget
            if self._hedges is None or len(attempts) > 1 or inbound.only is not None:
                response = await self._try(request, exchange, inbound, admitted, attempt)
            else:
                steps = self._steps(request, exchange, inbound, admitted)
                response = await self._hedges.run(inbound, attempts, attempt, steps)
                attempt = attempts[-1]
            if response is not None:
                return response
            if exchange.begun is not None:
                return await self._go_on(request, exchange, inbound, admitted, exchange.begun)
            assert attempt.outcome is not None
            if not attempt.outcome.is_retried:
                break
            self._blame.failed(exchange, inbound, attempt)
            risky = sum(a.outcome is not None and a.outcome.is_risky for a in attempts)
            if risky == MAX_DEFECTS or self._clock() >= exchange.deadline_s:
                break
        self._blame.settle(exchange)
        if exchange.answer is not None:
            return await self._send_whole(request, exchange, exchange.answer)
        error = attempts[-1].error
        assert error is not None
        raise error

    def _steps(self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted) -> Steps:
        return Steps(
            begin=partial(self._begin, exchange, inbound),
            run=partial(self._try, request, exchange, inbound, admitted),
            note_failure=partial(self._blame.failed, exchange, inbound),
        )

    async def _choose_again(self, request: web.Request, exchange: Exchange, inbound: Inbound) -> Choice | None:
        """Where a request goes that has failed; None: nowhere.

        It waits if that is because every pod is full, and where the last pod has left.
        """
        if inbound.only is not None:
            return None
        tried = self._reach.lacking(inbound) | {attempt.pod.pod_id for attempt in exchange.attempts}
        full = self._room.full(inbound.model)
        was_full = exchange.attempts[-1].outcome is Outcome.FULL
        try:
            if (full is None and was_full) or not self._fleet.pods(inbound.model):
                return self._chooser.choose(inbound, await self._reach.place(request, inbound, exchange))
            return self._chooser.choose(inbound, self._blame.to_avoid(inbound, tried | (full or set())))
        except (NoSuchPath, TooManyRequests, Unavailable):
            return None

    def _begin(self, exchange: Exchange, inbound: Inbound, choice: Choice) -> Attempt:
        lease = self._fleet.lease(
            choice.pod,
            prompt_tokens=inbound.prompt_tokens,
            uncached_tokens=max(0, inbound.prompt_tokens - choice.cached_tokens),
            output_tokens=inbound.output_tokens,
            streams=inbound.stream and inbound.prompts == 1,  # of several, most wait beyond its first byte
        )
        lease.loads_adapter = choice.loads_adapter
        now_s = self._clock()
        session_id = self._sessions.begin(choice.pod, inbound, now_s)
        told = self._chooser.told(inbound, choice, session_id or exchange.request_id)
        attempt = Attempt(choice, lease, now_s, told, session_id)
        if exchange.trace is not None:
            attempt.span_id = exchange.trace.child_id()
        exchange.attempts.append(attempt)
        return attempt

    def _attempt_deadline_s(self, exchange: Exchange, inbound: Inbound) -> float:
        """When an attempt is given up: it begins to answer by then, or has answered where the answer is no stream.

        Of a whole answer nothing is seen while it is made, so a pod that hangs looks like one that is busy. It must not
        take the time of all attempts; half of it leaves room for a long answer here and for one elsewhere.
        """
        now_s = self._clock()
        if inbound.stream:
            return min(exchange.deadline_s, now_s + self._limits.first_byte_s)
        if exchange.spent > self._limits.retries or inbound.only is not None:
            return exchange.deadline_s
        pods, attempts = self._fleet.pods(inbound.model), exchange.attempts
        if len(pods) <= len(attempts):  # else there is one that was not tried
            tried = {attempt.pod.pod_id for attempt in attempts}
            if all(pod.pod_id in tried for pod in pods):
                return exchange.deadline_s
        return now_s + WHOLE_ATTEMPT_SHARE * (exchange.deadline_s - now_s)

    async def _try(
        self,
        request: web.Request,
        exchange: Exchange,
        inbound: Inbound,
        admitted: Admitted,
        attempt: Attempt,
        race: Race | None = None,
    ) -> web.StreamResponse | None:
        """The attempt, counted on its pod while it lasts; one that comes to nothing is undone in the index.

        The answer where the client has all that it gets; None: another pod may do better, as `attempt` says, or give
        the rest of what `exchange.begun` has the beginning of.
        """
        opened: Opened | None = None
        deadline_s = self._attempt_deadline_s(exchange, inbound)
        try:
            with attempt:
                opened = await open_answer(
                    self._client,
                    attempt.pod.targets[inbound.endpoint],
                    inbound.body,
                    self._upstream.of(
                        request.raw_headers,
                        exchange.request_id,
                        attempt.pod,
                        attempt.session_id,
                        None if exchange.trace is None else exchange.trace.fields(attempt.span_id),
                    ),
                    deadline_s,
                    admitted.keep,
                    partial(leave_gate, request),
                )
                outcome = opened.outcome
                if outcome is Outcome.REFUSED and is_unknown_path(opened.response.status, opened.first):
                    outcome = Outcome.UNABLE
                    self._reach.lacks(attempt.pod.pod_id, inbound)
                if outcome.is_retried:
                    attempt.reason = "status"
                    attempt.error = failure_of(outcome, opened)
                    if outcome not in (Outcome.LEAVING, Outcome.ABORTED):
                        exchange.answer = self._whole_answer(opened, exchange, attempt.choice)
                    attempt.failed(outcome, self._clock())
                    return None
                if race is not None:
                    race.won_by(attempt)
                if outcome is not Outcome.REFUSED:
                    body = await self._body(exchange, opened, deadline_s)
                now_s = self._clock()
                attempt.first_byte_s = now_s
                if exchange.begun is None:
                    exchange.first_byte_s = now_s
                attempt.outcome = outcome
                if outcome is Outcome.REFUSED:
                    exchange.forget_faults()  # the request is wrong: no pod is to blame
                    exchange.answer = self._whole_answer(opened, exchange, attempt.choice)
                    return None
                attempt.has_run = True
                self._conversations.began(exchange, opened.first, attempt.pod.pod_id)
                self._end_retry(attempt)
                attempt.pod.faults.began(now_s)
                self._blame.settle(exchange, is_made_good=True)
                if inbound.prompts == 1:  # the headers of a stream know nothing yet of other prompts
                    exchange.usage = header_usage(opened.response.headers)
                    attempt.first_token(exchange.usage.cached_tokens)
                if not opened.is_whole:
                    return await self._pass_on(request, exchange, inbound, admitted, attempt, opened, body)
                self._fleet.served(attempt.pod, sent_s=attempt.sent_s)
                exchange.usage = whole_usage(opened.first).or_else(exchange.usage)
                exchange.answer = self._whole_answer(opened, exchange, attempt.choice)
                return None
        except PodFailed as failed:
            attempt.reason, attempt.error = failed.reason, failed.error
            attempt.failed(failed.outcome, self._clock())
            return None
        finally:
            attempt.ended_s = self._clock()
            if opened is not None:
                opened.close()
            self._end_retry(attempt)
            if not attempt.has_run:
                attempt.undone(self._chooser.undo(inbound, attempt.choice))

    def _end_retry(self, attempt: Attempt) -> None:
        """It has begun to answer, or will not: it may have been a further attempt until now."""
        if attempt.is_on_budget:
            attempt.is_on_budget = False
            self._retries.give_back()

    async def _body(self, exchange: Exchange, opened: Opened, deadline_s: float) -> Source:
        """What is read of an answer that is passed on. Raises PodFailed where it is no rest of what has begun."""
        if exchange.begun is None:
            return opened.response
        if not opened.is_stream:
            raise no_stream()
        assert exchange.begun.rewriter is not None
        body = RestBody(opened.response, opened.take_first(), exchange.begun.rewriter)
        opened.first = await body.begin(deadline_s)
        return body

    async def _pass_on(
        self,
        request: web.Request,
        exchange: Exchange,
        inbound: Inbound,
        admitted: Admitted,
        attempt: Attempt,
        opened: Opened,
        body: Source,
    ) -> web.StreamResponse | None:
        """Send the answer as it comes: the client sees the head. None: another pod may give the rest."""
        begun, on_first_sent = exchange.begun, None
        tail = Tail()
        is_ended = is_broken = False
        try:
            if begun is None:
                begun = exchange.begun = await self._begin_answer(request, exchange, inbound, admitted, opened, attempt)
                on_first_sent = admitted.let_go
            else:
                self._metrics.attempt_broke("resumed")
            relay = Relay(
                body,
                begun.writer,
                tail,
                is_events=opened.is_stream,
                idle_s=self._limits.idle_s,
                deadline_s=exchange.deadline_s,
                record=begun.record,
            )
            try:
                await relay.copy(opened.take_first(), on_first_sent=on_first_sent)
            except UpstreamBroke as error:
                exchange.error = error.detail
                self._blame.broke(inbound, attempt, error.outcome, error.detail)
                is_broken = True
                begun.stopped(error, relay, inbound, tail.usage().or_else(exchange.usage).prompt_tokens)
                is_over = await self._stop(request, exchange, inbound, begun)
                is_ended = True
                return begun.response if is_over else None
            self._fleet.served(attempt.pod, sent_s=attempt.sent_s)
            await begun.response.write_eof()
            is_ended = True
        except (ClientStalled, ConnectionError) as error:
            exchange.client_left(error)
        finally:
            said_usage = tail.usage(is_broken=is_broken) if opened.is_stream else whole_usage(tail.last_bytes())
            exchange.usage = said_usage.or_else(exchange.usage)
            if inbound.prompts == 1:
                attempt.lease.computed_tokens = exchange.usage.computed_tokens(attempt.pod.tells_cached_tokens)
            if not is_ended and request.transport is not None:
                request.transport.abort()  # so that nothing can end the answer as if it were whole
        return begun.response if begun is not None else web.Response()

    async def _begin_answer(
        self,
        request: web.Request,
        exchange: Exchange,
        inbound: Inbound,
        admitted: Admitted,
        opened: Opened,
        attempt: Attempt,
    ) -> Begun:
        """Send the head. Raises ConnectionError."""
        head = self._headers(opened.response, exchange, attempt.choice)
        response = Passed(status=opened.response.status, headers=head)
        if not opened.is_stream:
            response.content_length = opened.response.content_length
        writer = await response.prepare(request)
        assert writer is not None  # only a HEAD request has none
        is_kept = self._limits.resumes and opened.is_stream and inbound.prompts == 1
        is_kept &= inbound.endpoint in RESUMED
        record = Record(Endpoint(inbound.endpoint), admitted.keep) if is_kept else None
        return Begun(response, writer, opened.is_stream, record)

    async def _stop(self, request: web.Request, exchange: Exchange, inbound: Inbound, begun: Begun) -> bool:
        """A pod broke its stream. False: another one is to give the rest; else it is over for the client.

        Raises ClientStalled or ConnectionError.
        """
        if await self._end_complete(inbound, begun):
            return True
        assert begun.relay is not None
        why = begun.obstacle() or self._why_no_rest(exchange, inbound, begun)
        if not why:
            exchange.breaks += 1
            return False
        self._metrics.attempt_broke(why)
        await self._end_broken(request, begun)
        return True

    def _why_no_rest(self, exchange: Exchange, inbound: Inbound, begun: Begun) -> str:
        """Why no pod is asked for the rest, as metrics have it; empty where one can be."""
        is_late = exchange.spent > self._limits.retries or self._clock() >= exchange.deadline_s
        if is_late or begun.defects >= MAX_DEFECTS:
            return "failed"
        return "" if self._ways(exchange, inbound, begun) is not None else "engine"

    def _ways(self, exchange: Exchange, inbound: Inbound, begun: Begun) -> tuple[Way, set[PodId]] | None:
        avoided = self._blame.to_avoid(inbound, {attempt.pod.pod_id for attempt in exchange.attempts})
        return begun.ways(inbound, self._fleet.pods(inbound.model), avoided)

    async def _go_on(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted, begun: Begun
    ) -> web.StreamResponse:
        """The rest of a stream from another pod, or an error event at its end."""
        while not self._why_no_rest(exchange, inbound, begun):
            found = self._ways(exchange, inbound, begun)
            assert found is not None
            way, able = found
            asked = begun.rest(inbound, way)
            others = {pod.pod_id for pod in self._fleet.pods(inbound.model)} - able
            attempt = self._begin(exchange, asked, self._chooser.choose(asked, others))
            response = await self._try(request, exchange, asked, admitted, attempt)
            if response is not None:
                return response
            if attempt.has_run:  # it gave a part of the rest
                continue
            assert attempt.outcome is not None
            if not attempt.outcome.is_retried:
                break
            self._blame.failed(exchange, asked, attempt)
            begun.defects += attempt.outcome.is_risky
        self._blame.settle(exchange)
        begun.refused(exchange.answer)
        try:
            if not await self._end_complete(inbound, begun):
                self._metrics.attempt_broke("failed")
                await self._end_broken(request, begun)
        except (ClientStalled, ConnectionError) as error:
            exchange.client_left(error)
            if request.transport is not None:
                request.transport.abort()
        return begun.response

    async def _end_complete(self, inbound: Inbound, begun: Begun) -> bool:
        """Add the end, where nothing else is missing. Raises ClientStalled or ConnectionError."""
        missing = begun.ending(inbound)
        if missing is None:
            return False
        assert begun.relay is not None
        self._metrics.attempt_broke("ended")
        if missing:
            await begun.relay.say(missing)
        await begun.response.write_eof()
        return True

    async def _end_broken(self, request: web.Request, begun: Begun) -> None:
        """Say so. No last chunk: nobody takes the answer for whole, and no client pools the connection.

        Raises ClientStalled or ConnectionError.
        """
        assert begun.broke is not None
        assert begun.relay is not None
        self._metrics.broke()
        begun.response.force_close()
        if begun.is_stream:
            await begun.relay.end_with(begun.broke.last_event(request.path))
        if request.transport is not None:
            request.transport.close()

    async def _send_whole(self, request: web.Request, exchange: Exchange, answer: web.Response) -> web.StreamResponse:
        """Send an answer that is here already; its pod is done with it."""
        try:
            await send_whole(request, answer, idle_s=self._limits.idle_s, deadline_s=exchange.deadline_s)
        except (ClientStalled, ConnectionError) as error:
            exchange.client_left(error)
            if request.transport is not None:
                request.transport.abort()
        return answer

    def _whole_answer(self, opened: Opened, exchange: Exchange, choice: Choice) -> web.Response:
        return web.Response(
            status=opened.response.status, body=opened.first, headers=self._headers(opened.response, exchange, choice)
        )

    def _headers(self, upstream: Answer, exchange: Exchange, choice: Choice) -> CIMultiDict[str]:
        """The engine's headers, why the request went there, and what the tenant has left."""
        tells_cache = self._limits.tells_cache and exchange.tenant.tells_cache
        passed = answer_headers(upstream.headers, tells_cache=tells_cache)
        restore(passed, exchange)
        if tells_cache:
            passed[headers.POD] = choice.pod.pod_id
            passed[headers.POLICY] = choice.policy
            passed[headers.PREDICTED_CACHED] = str(choice.cached_tokens)
        passed[headers.REQUEST_ID] = exchange.request_id
        if exchange.inbound is not None and exchange.inbound.endpoint in MESSAGE_PATHS:
            passed[headers.MESSAGE_REQUEST_ID] = exchange.request_id
        if exchange.rate_headers:
            passed.update(exchange.rate_headers)
        return passed
