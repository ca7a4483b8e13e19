"""Go on with a stream that broke: end it, or get its rest from another pod."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from router.choosing.chooser import Chooser
from router.continuing.continuations import Continuation
from router.edge.errors import OutOfResources
from router.engines.attempt_result import Retry
from router.fleet.fleet import Fleet
from router.forwarding.attempts import Attempts
from router.forwarding.candidates import Candidates
from router.forwarding.failure_accounting import FailureAccounting
from router.forwarding.relay import ClientStalled
from router.forwarding.running import Interrupted, Over, Running
from router.forwarding.sender import Limits, Sender
from router.telemetry.metrics import Metrics
from router.views.types import PodId

MAX_DEFECTS = 2
"""Pods that may break on one request. If two break, the request is the likely cause, so no third pod gets it."""


class Resuming:
    """Goes on with the interrupted streams of all requests."""

    def __init__(
        self,
        fleet: Fleet,
        chooser: Chooser,
        attempts: Attempts,
        sender: Sender,
        candidates: Candidates,
        accounting: FailureAccounting,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._attempts = attempts
        self._sender = sender
        self._candidates = candidates
        self._accounting = accounting
        self._metrics = metrics
        self._limits = limits
        self._clock = asyncio.get_running_loop().time

    async def go_on(self, running: Running, interrupted: Interrupted) -> None:
        """End the answer, or get its rest from another pod. Afterwards the request is over, or interrupted anew."""
        is_left = True
        try:
            await self._go_on(running, interrupted)
            is_left = False
        except (ClientStalled, ConnectionError) as error:
            running.client_left(error, interrupted.stream.response)
            is_left = False
        finally:
            if is_left:
                running.cut()  # else aiohttp would write a second head into the answer

    async def _go_on(self, running: Running, interrupted: Interrupted) -> None:
        if await self._end_complete(running, interrupted):
            return
        why = interrupted.obstacle(running.inbound) or self._why_no_rest(running, interrupted)
        if not why:
            running.exchange.broke()
            tried = await self._ask(running, interrupted)
            if tried is None:
                return
            if await self._end_complete(running, tried):
                return
            why = "failed"
        self._metrics.attempts.attempt_broke(why)
        await self._end_broken(running, interrupted)

    async def _ask(self, running: Running, interrupted: Interrupted) -> Interrupted | None:
        """Ask pods for the rest until one sends a part of it; then return None. If none does, return the state."""
        exchange = running.exchange
        while not self._why_no_rest(running, interrupted):
            found = self._continuation(running, interrupted)
            assert found is not None
            continuation, able = found
            rest = interrupted.rest(running.inbound, continuation)
            others = {pod.pod_id for pod in self._fleet.pods(running.inbound.model)} - able
            attempt = self._attempts.begin(exchange, rest.inbound, self._chooser.choose(rest.inbound, others))
            try:
                result = await self._sender.run(running, attempt, rest)
            except OutOfResources as error:  # another pod would not help, and the client has the head of the answer
                exchange.failed(error.message)
                break
            if running.state is not interrupted:
                return None
            if not isinstance(result, Retry):
                break
            running.state = interrupted = replace(interrupted, defects=interrupted.defects + result.cause.is_risky)
        self._accounting.settle(exchange)
        interrupted.refused(exchange.whole_answer)
        return interrupted

    def _why_no_rest(self, running: Running, interrupted: Interrupted) -> str:
        """Return why no pod is asked for the rest, as the label in the metrics; empty if one can be asked."""
        exchange = running.exchange
        is_late = exchange.spent > self._limits.retries or self._clock() >= exchange.arrival.deadline_s
        if is_late or interrupted.defects >= MAX_DEFECTS:
            return "failed"
        return "" if self._continuation(running, interrupted) is not None else "engine"

    def _continuation(self, running: Running, interrupted: Interrupted) -> tuple[Continuation, set[PodId]] | None:
        inbound = running.inbound
        avoided = self._candidates.to_avoid(inbound, {attempt.pod.pod_id for attempt in running.exchange.attempts})
        return interrupted.continuation(inbound, self._fleet.pods(inbound.model), avoided)

    async def _end_complete(self, running: Running, interrupted: Interrupted) -> bool:
        """Send the end of the answer if nothing else is missing; return whether it did.

        Raises ClientStalled or ConnectionError.
        """
        missing = interrupted.ending(running.inbound)
        if missing is None:
            return False
        self._metrics.attempts.attempt_broke("ended")
        if missing:
            await interrupted.relay.say(missing)
        response = interrupted.stream.response
        await response.write_eof()
        running.exchange.failed(None)
        running.state = Over(response)
        return True

    async def _end_broken(self, running: Running, interrupted: Interrupted) -> None:
        """Send an error event and close the connection, without the last chunk.

        So no client takes the answer for complete or reuses the connection. Raises ClientStalled or ConnectionError.
        """
        self._metrics.attempts.broke()
        stream, request = interrupted.stream, running.request
        stream.response.force_close()
        if stream.is_stream:
            await interrupted.relay.end_with(interrupted.broke.last_event(request.path, interrupted.next_number))
        if request.transport is not None:
            request.transport.close()
        running.state = Over(stream.response)
