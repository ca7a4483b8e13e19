"""Send one attempt to its pod, decide the result, and pass the answer on as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from engine.contract import headers
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.requests import Endpoint
from router.choosing.chooser import Choice
from router.continuing.resume import RESUMED
from router.continuing.transcript import SentEvents
from router.edge.errors import BadGateway, UpstreamError
from router.edge.headers import UpstreamHeaders, answer_headers
from router.engines.attempt_result import (
    GOES_ON,
    Broken,
    Cause,
    ClientHas,
    Done,
    ErrorStatus,
    GoesOn,
    Refused,
    Result,
    Retry,
    ended,
    result_of,
)
from router.engines.engine_client import Answer, EngineClient
from router.engines.stream_reader import StreamReader
from router.engines.upstream import Opened, Patience, PodFailed, failure_of, open_answer, target_of
from router.engines.usage import header_usage, whole_usage
from router.forwarding.attempts import restore_session
from router.forwarding.candidates import Candidates
from router.forwarding.conversations import Conversations
from router.forwarding.exchange import Attempt, Exchange
from router.forwarding.failure_accounting import FailureAccounting
from router.forwarding.hedge import Race
from router.forwarding.relay import ClientStalled, Relay, StreamBroke
from router.forwarding.running import (
    UNANSWERED,
    Interrupted,
    Over,
    PartialStream,
    Passed,
    Rest,
    RestBody,
    Running,
    Streaming,
    interrupted,
)
from router.forwarding.silence import Silence, StreamWatch
from router.reading.engine_fields import warning_of
from router.telemetry.metrics import Metrics

_ENDED = (Over, Interrupted)
EASIER_SHARE = 0.5
"""A request whose first token is late leaves a pod that works only for one with at most this share of its requests."""
WHOLE_ATTEMPT_SHARE = 0.5
"""Share of the remaining time that an attempt at a whole answer may take while another pod is left to try."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, the number of further pods to try, and what answers may tell clients."""

    first_byte_s: float
    idle_s: float
    retries: int
    tells_cache: bool = True
    """Whether answers may have the headers about pods and caches."""
    resumes: bool = True
    """Whether another pod is asked for the rest of a stream that breaks."""
    hedge_after_s: float = 0.0
    """Seconds without a first byte until a second pod is asked too; 0: never."""


class Sender:
    """Runs the attempts of all requests, each at one pod."""

    def __init__(
        self,
        client: EngineClient,
        upstream: UpstreamHeaders,
        candidates: Candidates,
        accounting: FailureAccounting,
        conversations: Conversations,
        metrics: Metrics,
        limits: Limits,
        silence: Silence,
    ) -> None:
        self._client = client
        self._upstream = upstream
        self._candidates = candidates
        self._accounting = accounting
        self._conversations = conversations
        self._metrics = metrics
        self._limits = limits
        self._silence = silence
        self._clock = asyncio.get_running_loop().time

    async def run(
        self, running: Running, attempt: Attempt, rest: Rest | None = None, race: Race[Result] | None = None
    ) -> Result:
        """Run the attempt, counted on its pod while it lasts, and return its result.

        `rest`: how the answer continues the stream that an earlier pod broke, if it does. `race`: is told as soon
        as there is an answer for the client. Afterwards the request is answered, or interrupted, or its state is as
        before and the attempt has a reply. Raises OutOfResources.
        """
        client_has = ClientHas.NOTHING if rest is None else ClientHas.EARLIER_PART
        opened: Opened | None = None
        try:
            with attempt:
                patience = self._patience(running.exchange, attempt)
                opened = await self._open(running, attempt, patience)
                result, reply = self._decide(running, attempt, opened, client_has)
                if isinstance(result, Retry):
                    attempt.answered(result, reply)
                    return result
                if race is not None:
                    race.won_by(attempt)
                if rest is not None and isinstance(result, GoesOn):
                    body = RestBody(opened.rest, opened.take_first(), rest.rewriter)
                    opened.rest, opened.reader = body, StreamReader(running.inbound.endpoint, is_rest=True)
                    opened.first = await body.begin(opened.reader, patience.until_s, attempt.pod.url)
                attempt.answered(result, reply)
                self._began(running, attempt, opened)
                if isinstance(result, GoesOn):
                    result = await self._pass_on(running, attempt, opened)
                    attempt.answered(result)
        except PodFailed as failed:
            is_at_work = attempt.pod.faults.is_at_work(self._clock())
            result = result_of(failed.observed, client_has, is_at_work=is_at_work)
            attempt.answered(result, failed.error)
        finally:
            if opened is not None:
                opened.close()
            self._accounting.ended(running.exchange, attempt)
        return result

    def _patience(self, exchange: Exchange, attempt: Attempt) -> Patience:
        """Return how long an attempt may take: by then a stream has to begin, or a whole answer to be complete.

        A whole answer shows nothing while the pod makes it, so a pod that hangs looks busy. Such a pod must not use
        up the time of all attempts: half of the time that is left allows a long answer here, and another one elsewhere.
        """
        now_s, last_s, asked = self._clock(), exchange.arrival.deadline_s, attempt.asked
        if asked.stream:
            until_s = min(last_s, now_s + self._limits.first_byte_s)
            return Patience(until_s, lambda: self._longer(exchange, attempt))
        is_last = exchange.spent > self._limits.retries or asked.only is not None
        if is_last or not self._candidates.has_untried(exchange, asked):
            return Patience(last_s)
        return Patience(now_s + WHOLE_ATTEMPT_SHARE * (last_s - now_s))

    def _longer(self, exchange: Exchange, attempt: Attempt) -> float | None:
        """Return until when to wait on for a first token that is late; None to give the attempt up.

        A pod that works on other requests is only full. To leave it loses the place in its queue, so the request leaves
        it only for a pod that has much less to do.
        """
        now_s, last_s = self._clock(), exchange.arrival.deadline_s
        if now_s >= last_s or not self._silence.is_at_work(attempt.pod):
            return None
        if self._candidates.has_free(exchange, attempt.asked, EASIER_SHARE * attempt.pod.in_flight):
            return None
        return min(last_s, now_s + self._limits.first_byte_s)

    async def _open(self, running: Running, attempt: Attempt, patience: Patience) -> Opened:
        """Send the request. Raises PodFailed and OutOfResources."""
        arrival, asked, raw = running.exchange.arrival, attempt.asked, running.request.raw_headers
        return await open_answer(
            self._client,
            target_of(attempt.pod, asked),
            asked,
            self._upstream.of(
                raw if asked.upload is None else asked.upload.fields(raw),
                arrival.engine_request_id,
                attempt.pod,
                attempt.session_id or arrival.engine_session,
                None if arrival.trace is None else arrival.trace.fields(attempt.span_id),
            ),
            patience,
            running.admitted.keep,
            running.leaving_fifo(),
            has_own_key=self._upstream.has_own_key(attempt.pod),
        )

    def _decide(
        self, running: Running, attempt: Attempt, opened: Opened, client_has: ClientHas
    ) -> tuple[Result, web.Response | UpstreamError | None]:
        """Return the result of an attempt whose answer has begun, and what the client may get; None: it is passed on
        as it comes."""
        observed = opened.observed
        if isinstance(observed, ErrorStatus) and observed.is_unknown_path:
            self._candidates.lacks(attempt.pod, attempt.asked)
        result = result_of(observed, client_has, is_at_work=attempt.pod.faults.is_at_work(self._clock()))
        match result:
            case Retry(cause) if (failure := failure_of(observed, cause, opened.response.status)) is not None:
                return result, failure
            case Retry(Cause.UNABLE) if not isinstance(observed, ErrorStatus):
                text = "the engine was asked for the rest of a stream and did not send a stream"
                return result, BadGateway(text)
            case Retry() | Refused() | Done():
                fields = self._headers(opened.response, running.exchange, attempt.choice)
                return result, web.Response(status=opened.response.status, body=opened.first, headers=fields)
            case GoesOn() | Broken():
                return result, None

    def _began(self, running: Running, attempt: Attempt, opened: Opened) -> None:
        """Record that the pod has an answer for the client."""
        exchange, now_s = running.exchange, self._clock()
        if running.state is UNANSWERED:
            exchange.began(now_s)
        attempt.first_byte_s = now_s
        if not attempt.has_run:
            return
        exchange.failed(None)
        attempt.pod.knows(attempt.asked.endpoint)
        if attempt.asked.endpoint == Endpoint.RESPONSES:
            self._conversations.began(exchange, opened.first, attempt.pod.pod_id)
        self._accounting.began(exchange, attempt, now_s)
        if attempt.asked.prompts == 1:  # else a stream's headers tell only of the first prompt
            usage = header_usage(opened.response.headers)
            exchange.recounted(usage)
            attempt.first_token(usage.cached_tokens)
        if opened.is_whole:
            exchange.counted(whole_usage(opened.first))

    async def _pass_on(self, running: Running, attempt: Attempt, opened: Opened) -> Result:
        """Send the head, and pass the body on as it comes."""
        exchange = running.exchange
        relay: Relay | None = None
        before = running.state if isinstance(running.state, Interrupted) else None
        result: Result = GOES_ON
        response: web.StreamResponse | None = None
        is_broken = False
        try:
            stream, on_first_sent = await self._stream(running, attempt, opened)
            response = stream.response
            relay = Relay(
                opened.rest,
                stream.writer,
                reader=opened.reader,
                idle_s=self._limits.idle_s,
                deadline_s=exchange.arrival.deadline_s,
                watch=StreamWatch(attempt.pod, self._silence),
                sent=stream.sent,
                is_json=opened.content_length is None and opened.response.content_type == "application/json",
            )
            try:
                await relay.copy(opened.take_first(), on_first_sent=on_first_sent)
            except StreamBroke as broke:
                is_broken = True
                exchange.failed(broke.detail)
                result = result_of(broke.observed, ClientHas.PART)
                counted = relay.usage().or_else(exchange.usage).prompt_tokens
                is_risky = isinstance(result, Broken) and result.cause.is_risky
                running.state = interrupted(stream, broke, relay, running.inbound, counted, before, is_risky=is_risky)
                return result
            result = result_of(ended(is_stream=opened.is_stream), ClientHas.PART)
            await response.write_eof()
            running.state = Over(response)
        except (ClientStalled, ConnectionError) as error:
            running.client_left(error, web.Response() if response is None else response)
        finally:
            if relay is not None:
                exchange.counted(relay.usage(is_broken=is_broken))
            if running.inbound.prompts == 1:
                attempt.tracked.computed_tokens = exchange.usage.computed_tokens(attempt.pod.tells_cached_tokens)
            if not isinstance(running.state, _ENDED):
                running.cut()
        return result

    async def _stream(
        self, running: Running, attempt: Attempt, opened: Opened
    ) -> tuple[PartialStream, Callable[[], None] | None]:
        """Return the stream that the client has the head of, and what to call once the first bytes are sent.

        Raises ConnectionError.
        """
        if isinstance(running.state, Interrupted):
            stream = running.state.stream
            running.state = Streaming(stream)
            self._metrics.attempts.attempt_broke("resumed")
            return stream, None
        fields = self._headers(opened.response, running.exchange, attempt.choice)
        response = Passed(status=opened.response.status, headers=fields)
        if not opened.is_stream:
            response.content_length = opened.content_length
        writer = await response.prepare(running.request)
        assert writer is not None  # only a HEAD request has none
        inbound = running.inbound
        is_kept = self._limits.resumes and opened.is_stream and inbound.prompts == 1
        is_kept &= inbound.endpoint in RESUMED and inbound.resource is None
        sent = SentEvents(Endpoint(inbound.endpoint), running.admitted.keep) if is_kept else None
        stream = PartialStream(response, writer, opened.is_stream, sent)
        running.state = Streaming(stream)
        return stream, running.admitted.let_go

    def _headers(self, upstream: Answer, exchange: Exchange, choice: Choice) -> CIMultiDict[str]:
        """Return the engine's headers, those that tell why the request went there, and the tenant's rate limits."""
        arrival = exchange.arrival
        tells_cache = self._limits.tells_cache and arrival.tenant.tells_cache
        passed = answer_headers(upstream.headers, tells_cache=tells_cache)
        restore_session(passed, exchange)
        if tells_cache:
            passed[headers.POD] = choice.pod.pod_id
            passed[headers.POLICY] = choice.policy
            passed[headers.PREDICTED_CACHED] = str(choice.cached_tokens)
        passed[headers.REQUEST_ID] = arrival.request_id
        if exchange.inbound is not None and exchange.inbound.endpoint in MESSAGE_PATHS:
            passed[headers.MESSAGE_REQUEST_ID] = arrival.request_id
        if exchange.inbound is not None and exchange.inbound.dropped:
            passed.add(headers.WARNING, warning_of(exchange.inbound.dropped))
        passed.update(exchange.rate_headers)
        return passed
