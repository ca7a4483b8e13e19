"""Forward a request to a pod and its answer to the client; try another pod while the client has seen nothing."""

from __future__ import annotations

import asyncio
from typing import assert_never

from aiohttp import web

from router.choosing.chooser import Choice
from router.edge.errors import UpstreamError
from router.engines.attempt_result import Cause, Result, Retry
from router.forwarding.attempts import Attempts
from router.forwarding.candidates import Candidates
from router.forwarding.exchange import Attempt
from router.forwarding.failure_accounting import FailureAccounting
from router.forwarding.hedge import Hedges, Steps
from router.forwarding.relay import ClientStalled, send_whole
from router.forwarding.resuming import MAX_DEFECTS, Resuming
from router.forwarding.running import UNANSWERED, Interrupted, Over, Running, Streaming, Unanswered
from router.forwarding.sender import Limits, Sender


class Proxy:
    """Carries requests to pods and their answers back to clients."""

    def __init__(
        self,
        candidates: Candidates,
        attempts: Attempts,
        sender: Sender,
        resuming: Resuming,
        accounting: FailureAccounting,
        hedges: Hedges | None,
        limits: Limits,
    ) -> None:
        self._candidates = candidates
        self._attempts = attempts
        self._sender = sender
        self._resuming = resuming
        self._accounting = accounting
        self._hedges = hedges
        self._limits = limits
        self._inside = 0
        """Requests that the proxy is handling."""
        self._clock = asyncio.get_running_loop().time

    async def forward(self, running: Running) -> web.StreamResponse:
        """Send the answer to the client and return it. Raises ApiError if there is none to pass on."""
        self._inside += 1
        try:
            while True:
                state = running.state
                match state:
                    case Unanswered():
                        await self._ask(running)
                    case Interrupted():
                        await self._resuming.go_on(running, state)
                    case Over(response):
                        return response
                    case Streaming():
                        raise AssertionError("an attempt ended and left its stream running")
                    case _:
                        assert_never(state)
        finally:
            self._inside -= 1
            self._accounting.settle(running.exchange)  # in case the client has left between two attempts

    async def _ask(self, running: Running) -> None:
        """Ask one pod after another until one has an answer. Raises ApiError if none has."""
        exchange, attempts = running.exchange, running.exchange.attempts
        while exchange.spent <= self._limits.retries:
            attempt = await self._next(running)
            if attempt is None:
                break
            if self._hedges is None or len(attempts) > 1 or running.inbound.only is not None:
                result: Result | None = await self._sender.run(running, attempt)
            else:
                result = await self._hedged(running, self._hedges, attempt)
            if running.state is not UNANSWERED:
                return
            if not isinstance(result, Retry):
                break
            risky = sum(cause is not None and cause.is_risky for cause in [attempt.cause for attempt in attempts])
            if risky == MAX_DEFECTS or self._clock() >= exchange.arrival.deadline_s:
                break
        self._accounting.settle(exchange)
        answer = exchange.whole_answer
        if answer is None:
            error = attempts[-1].reply
            assert isinstance(error, UpstreamError)
            raise error
        await self._send_whole(running, answer)

    async def _next(self, running: Running) -> Attempt | None:
        """Begin the next attempt; None if there is no pod for it, or if retries are too many already.

        Raises as `Candidates.first`.
        """
        exchange, inbound, on_wait = running.exchange, running.inbound, running.leaving_fifo()
        if not exchange.attempts:
            return self._attempts.begin(exchange, inbound, await self._candidates.first(exchange, inbound, on_wait))
        choice = await self._candidates.next(exchange, inbound, on_wait)
        if choice is None:
            return None
        # A pod that only said that it leaves has done no work, so another attempt adds no load.
        is_on_budget = exchange.attempts[-1].cause is not Cause.LEAVING
        if is_on_budget and not self._accounting.may_retry(inbound, choice, self._inside):
            return None
        return self._attempts.begin(exchange, inbound, choice, is_on_budget=is_on_budget)

    async def _hedged(self, running: Running, hedges: Hedges, first: Attempt) -> Result | None:
        """Run the first attempt, and perhaps a second one beside it. Return the result of the one that counts."""
        exchange, inbound = running.exchange, running.inbound

        def begin(choice: Choice) -> Attempt:
            return self._attempts.begin(exchange, inbound, choice)

        steps = Steps(begin, lambda attempt, race: self._sender.run(running, attempt, race=race))
        await hedges.run(inbound, exchange.attempts, first, steps)
        return exchange.attempts[-1].result

    async def _send_whole(self, running: Running, answer: web.Response) -> None:
        """Send an answer that has been received whole."""
        deadline_s = running.exchange.arrival.deadline_s
        try:
            await send_whole(running.request, answer, idle_s=self._limits.idle_s, deadline_s=deadline_s)
        except (ClientStalled, ConnectionError) as error:
            running.client_left(error, answer)
        running.state = Over(answer)
