"""Forward a request to a pod and its answer to the client; try another pod while the client has seen nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from functools import partial

from aiohttp import web
from multidict import CIMultiDict

from engine.contract import headers
from engine.contract.errors import TooManyRequests, Unavailable
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.requests import Endpoint
from router.choosing.chooser import Choice, Chooser
from router.continuing.continuations import Way
from router.continuing.record import Record
from router.continuing.resume import RESUMED
from router.edge.admission import Admitted
from router.edge.connection_limits import leaving_gate
from router.edge.errors import OutOfResources
from router.edge.headers import UpstreamHeaders, answer_headers
from router.engines.engine_client import Answer, EngineClient
from router.engines.outcome import Outcome
from router.engines.upstream import Opened, PodFailed, failure_of, open_answer, target_of
from router.engines.usage import Tail, header_usage, whole_usage
from router.fleet.fleet import Fleet
from router.forwarding.attempt import Attempt
from router.forwarding.attempts import Attempts
from router.forwarding.candidates import NoSuchPath, Reach, is_unknown_path
from router.forwarding.conversations import Conversations
from router.forwarding.exchange import Exchange
from router.forwarding.failure_accounting import Blame
from router.forwarding.hedge import Hedges, Race, Steps
from router.forwarding.limits import Limits
from router.forwarding.partial_stream import Begun, Passed, RestBody, no_stream
from router.forwarding.relay import ClientStalled, Relay, Source, UpstreamBroke, send_whole
from router.forwarding.sessions import restore
from router.forwarding.waiting import WaitingRoom
from router.overload.retries import RetryBudget
from router.reading.inbound import Inbound
from router.telemetry.metrics import Metrics
from router.views.types import PodId

WHOLE_ATTEMPT_SHARE = 0.5
"""Share of the remaining time that an attempt at a whole answer may take while another pod is left to try."""
MAX_DEFECTS = 2
"""Pods that may break on one request. If two break, the request is the likely cause, so no third pod gets it."""


class Proxy:
    """Carries requests to pods and their answers back to clients."""

    def __init__(
        self,
        client: EngineClient,
        upstream: UpstreamHeaders,
        fleet: Fleet,
        chooser: Chooser,
        room: WaitingRoom,
        metrics: Metrics,
        limits: Limits,
        attempts: Attempts,
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
        self._begin = attempts.begin
        self._inside = 0
        """Requests that the proxy is handling."""
        self._retries = RetryBudget()
        self._hedges = Hedges(limits.hedge_after_s, fleet, chooser, room, metrics) if limits.hedge_after_s else None
        self._clock = asyncio.get_running_loop().time

    async def forward(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted
    ) -> web.StreamResponse:
        """Send the answer to the client and return it. Raises ApiError if there is none to pass on."""
        self._inside += 1
        try:
            return await self._forward(request, exchange, inbound, admitted)
        finally:
            self._inside -= 1
            self._blame.settle(exchange)  # in case the client has left between two attempts

    async def _forward(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted
    ) -> web.StreamResponse:
        attempts = exchange.attempts
        while exchange.spent <= self._limits.retries:
            if not attempts:
                choice = self._chooser.choose(inbound, await self._place(request, inbound, exchange))
            else:
                again = await self._choose_again(request, exchange, inbound)
                if again is None:
                    break
                choice = again
                # A pod that only said that it leaves has done no work, so another attempt adds no load.
                is_on_budget = attempts[-1].outcome is not Outcome.LEAVING
                if is_on_budget and not self._retries.take(self._inside):
                    self._chooser.undo(inbound, choice)
                    self._metrics.attempts.retry_refused()
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
        """Choose a pod for the next attempt of a request that has failed; None if there is none.

        The request waits if every pod is full and so was the last one tried, or if no pod is left. A request bound to
        one pod, and an upload that cannot be sent again from its beginning, get no further attempt.
        """
        if inbound.only is not None or (inbound.upload is not None and not inbound.upload.is_replayable):
            return None
        tried = self._reach.lacking(inbound) | {attempt.pod.pod_id for attempt in exchange.attempts}
        full = self._room.full(inbound.model)
        was_full = exchange.attempts[-1].outcome is Outcome.FULL
        try:
            if (full is None and was_full) or not self._fleet.pods(inbound.model):
                return self._chooser.choose(inbound, await self._place(request, inbound, exchange))
            avoided = tried | (full or set())
            if not was_full and all(pod.pod_id in avoided for pod in self._fleet.pods(inbound.model)):
                avoided = tried  # all others are full: one of them queues the request
            return self._chooser.choose(inbound, self._blame.to_avoid(inbound, avoided))
        except (NoSuchPath, TooManyRequests, Unavailable):
            return None

    async def _place(self, request: web.Request, inbound: Inbound, exchange: Exchange) -> Set[PodId]:
        """Wait until some pod may take the request, and return the pods to avoid. Raises as `Reach.place`."""
        return await self._reach.place(inbound, exchange, leaving_gate(request))

    def _attempt_deadline_s(self, exchange: Exchange, inbound: Inbound) -> float:
        """Return when to give up an attempt: by then a stream has to begin, or a whole answer to be complete.

        A whole answer shows nothing while the pod makes it, so a pod that hangs looks busy. Such a pod must not use
        up the time of all attempts: half of the time that is left allows a long answer here, and another one elsewhere.
        """
        now_s = self._clock()
        if inbound.stream:
            return min(exchange.deadline_s, now_s + self._limits.first_byte_s)
        if exchange.spent > self._limits.retries or inbound.only is not None:
            return exchange.deadline_s
        pods, attempts = self._fleet.pods(inbound.model), exchange.attempts
        if len(pods) <= len(attempts):  # with more pods than attempts, some pod is untried
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
        """Run the attempt, counted on its pod while it lasts. An attempt that never ran is undone in the index.

        Return the response once the client has all that it will get. Return None if another pod may do better (see
        `attempt`), if `exchange.answer` is to be sent, or if `exchange.begun` needs its rest.
        """
        opened: Opened | None = None
        deadline_s = self._attempt_deadline_s(exchange, inbound)
        try:
            with attempt:
                opened = await open_answer(
                    self._client,
                    target_of(attempt.pod, inbound),
                    inbound.upload or inbound.body,
                    self._upstream.of(
                        request.raw_headers if inbound.upload is None else inbound.upload.fields(request.raw_headers),
                        exchange.request_id,
                        attempt.pod,
                        attempt.session_id,
                        None if exchange.trace is None else exchange.trace.fields(attempt.span_id),
                    ),
                    deadline_s,
                    admitted.keep,
                    leaving_gate(request),
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
                now_s = attempt.first_byte_s = self._clock()
                if exchange.begun is None:
                    exchange.first_byte_s = now_s
                attempt.outcome = outcome
                if outcome is not Outcome.REFUSED or exchange.begun is None:
                    exchange.error = None
                if outcome is Outcome.REFUSED:
                    exchange.forget_faults()  # the request is wrong: no pod is to blame
                    exchange.answer = self._whole_answer(opened, exchange, attempt.choice)
                    return None
                attempt.has_run = True
                self._conversations.began(exchange, opened.first, attempt.pod.pod_id)
                if attempt.is_on_budget:
                    self._end_retry(attempt)
                attempt.pod.faults.began(now_s)
                if len(exchange.attempts) > 1:
                    self._blame.settle(exchange, is_made_good=True)
                if inbound.prompts == 1:  # else a stream's headers tell only of the first prompt
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
            if attempt.is_on_budget:
                self._end_retry(attempt)
            if not attempt.has_run:
                attempt.undone(self._chooser.undo(inbound, attempt.choice))

    def _end_retry(self, attempt: Attempt) -> None:
        """Take the attempt off the retry budget: it has begun to answer, or it has failed."""
        attempt.is_on_budget = False
        self._retries.give_back()

    async def _body(self, exchange: Exchange, opened: Opened, deadline_s: float) -> Source:
        """Return the body to pass on. Raises PodFailed if it cannot continue the answer that has begun."""
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
        """Send the head, and pass the body on as it comes. Return None if another pod may give the rest."""
        begun, on_first_sent = exchange.begun, None
        tail = Tail()
        is_ended = is_broken = False
        try:
            if begun is None:
                begun = exchange.begun = await self._begin_answer(request, exchange, inbound, admitted, opened, attempt)
                on_first_sent = admitted.let_go
            else:
                self._metrics.attempts.attempt_broke("resumed")
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
                request.transport.abort()  # so that nothing can end the answer as if it were complete
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
        is_kept &= inbound.endpoint in RESUMED and inbound.resource is None
        record = Record(Endpoint(inbound.endpoint), admitted.keep) if is_kept else None
        return Begun(response, writer, opened.is_stream, record)

    async def _stop(self, request: web.Request, exchange: Exchange, inbound: Inbound, begun: Begun) -> bool:
        """End the answer whose stream a pod broke, or return False if another pod is to give the rest.

        Raises ClientStalled or ConnectionError.
        """
        if await self._end_complete(exchange, inbound, begun):
            return True
        assert begun.relay is not None
        why = begun.obstacle(inbound) or self._why_no_rest(exchange, inbound, begun)
        if not why:
            exchange.breaks += 1
            return False
        self._metrics.attempts.attempt_broke(why)
        await self._end_broken(request, begun)
        return True

    def _why_no_rest(self, exchange: Exchange, inbound: Inbound, begun: Begun) -> str:
        """Return why no pod is asked for the rest, as the label in the metrics; empty if one can be asked."""
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
        """Send the rest of a stream from another pod. Failing that, end it, with an error if text is missing."""
        is_over = False
        try:
            response = await self._rest(request, exchange, inbound, admitted, begun)
            if response is None and not await self._end_complete(exchange, inbound, begun):
                self._metrics.attempts.attempt_broke("failed")
                await self._end_broken(request, begun)
            is_over = True
            return response or begun.response
        except (ClientStalled, ConnectionError) as error:
            exchange.client_left(error)
            return begun.response
        finally:
            if not is_over and request.transport is not None:
                request.transport.abort()  # else aiohttp would write a second head into the answer

    async def _rest(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted, begun: Begun
    ) -> web.StreamResponse | None:
        """Send the rest of a stream from another pod. Return None if no pod gave all of it."""
        while not self._why_no_rest(exchange, inbound, begun):
            found = self._ways(exchange, inbound, begun)
            assert found is not None
            way, able = found
            asked = begun.rest(inbound, way)
            others = {pod.pod_id for pod in self._fleet.pods(inbound.model)} - able
            attempt = self._begin(exchange, asked, self._chooser.choose(asked, others))
            try:
                response = await self._try(request, exchange, asked, admitted, attempt)
            except OutOfResources as error:  # another pod would not help, and the client has the head of the answer
                exchange.error = error.message
                break
            if response is not None:
                return response
            if attempt.has_run:  # the pod gave a part of the rest
                continue
            assert attempt.outcome is not None
            if not attempt.outcome.is_retried:
                break
            self._blame.failed(exchange, asked, attempt)
            begun.defects += attempt.outcome.is_risky
        self._blame.settle(exchange)
        begun.refused(exchange.answer)
        return None

    async def _end_complete(self, exchange: Exchange, inbound: Inbound, begun: Begun) -> bool:
        """Send the end of the answer if nothing else is missing; return whether it did.

        Raises ClientStalled or ConnectionError.
        """
        missing = begun.ending(inbound)
        if missing is None:
            return False
        assert begun.relay is not None
        self._metrics.attempts.attempt_broke("ended")
        if missing:
            await begun.relay.say(missing)
        await begun.response.write_eof()
        exchange.error = None
        return True

    async def _end_broken(self, request: web.Request, begun: Begun) -> None:
        """Send an error event and close the connection, without the last chunk.

        So no client takes the answer for complete or reuses the connection. Raises ClientStalled or ConnectionError.
        """
        assert begun.broke is not None
        assert begun.relay is not None
        self._metrics.attempts.broke()
        begun.response.force_close()
        if begun.is_stream:
            await begun.relay.end_with(begun.broke.last_event(request.path, begun.next_number))
        if request.transport is not None:
            request.transport.close()

    async def _send_whole(self, request: web.Request, exchange: Exchange, answer: web.Response) -> web.StreamResponse:
        """Send an answer that has been received whole."""
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
        """Return the engine's headers, those that tell why the request went there, and the tenant's rate limits."""
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
        passed.update(exchange.rate_headers)
        return passed
