"""Ask a second pod while the first is silent: the pod that answers first serves the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.choosing.chooser import Choice, Chooser
from router.edge.errors import OutOfResources
from router.fleet.fleet import Fleet
from router.forwarding.exchange import Attempt
from router.forwarding.waiting import WaitingRoom
from router.overload.hedges import HedgeBudget
from router.reading.inbound import Inbound
from router.telemetry.metrics import Metrics

LATE = 2.0
"""An answer is late after this multiple of its predicted time to the first token, if the policy predicts one: long
prompts are slow on any pod."""


T = TypeVar("T")
"""What an attempt returns."""


@dataclass(frozen=True, slots=True)
class Steps(Generic[T]):
    """Steps of the proxy for one request."""

    begin: Callable[[Choice], Attempt]
    """Begins a further attempt."""
    run: Callable[[Attempt, Race[T] | None], Awaitable[T]]
    """Runs the attempt to its end, and acts on its result. It tells the race as soon as it has an answer for the
    client."""


class Hedges:
    """Decides when a second pod is asked, how often, and which one."""

    def __init__(self, after_s: float, fleet: Fleet, chooser: Chooser, room: WaitingRoom, metrics: Metrics) -> None:
        """`after_s`: seconds without a byte of an answer until a second pod is asked."""
        self._after_s = after_s
        self._fleet = fleet
        self._chooser = chooser
        self._room = room
        self._metrics = metrics
        self._budget = HedgeBudget()

    async def run(self, inbound: Inbound, attempts: list[Attempt], first: Attempt, steps: Steps[T]) -> T | None:
        """Run the first attempt, and perhaps a second beside it.

        Afterwards the last of `attempts` is the one that gave the result or failed last. An answer that is no stream
        is not hedged: no byte of it comes before its end.
        """
        self._budget.saw()
        if not inbound.stream:
            return await steps.run(first, None)
        predicted_s = first.choice.decision.predicted_ttft_s or 0.0
        race = Race(attempts, first, lambda: self._second(inbound, first), steps)
        try:
            return await race.run(max(self._after_s, LATE * predicted_s))
        finally:
            if race.second is not None:
                self._metrics.attempts.hedged("won" if race.winner is race.second else "lost")

    def _second(self, inbound: Inbound, first: Attempt) -> Choice | None:
        """Choose a second pod; None if there is none. Full, contended and possibly broken pods are left out."""
        busy = self._room.busy(inbound.model)
        if busy is not None:
            avoided = busy | self._fleet.doubtful(inbound.model) | {first.pod.pod_id}
            has_other = any(pod.pod_id not in avoided for pod in self._fleet.pods(inbound.model))
            if has_other and self._budget.take():
                return self._chooser.choose(inbound, avoided)
        self._metrics.attempts.hedged("refused")
        return None


class Race(Generic[T]):
    """Two attempts at a request. The first runs in the request's own task, so it need not wait for another task."""

    def __init__(
        self, attempts: list[Attempt], first: Attempt, choose_second: Callable[[], Choice | None], steps: Steps[T]
    ) -> None:
        self._attempts = attempts
        self._first = first
        self._choose_second = choose_second
        self._steps = steps
        self._request = asyncio.current_task()
        self._hedge: asyncio.Task[T | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_first_running = True
        self.second: Attempt | None = None
        """The second attempt, once it has begun."""
        self.winner: Attempt | None = None
        """The attempt whose answer the client gets."""

    async def run(self, after_s: float) -> T | None:
        """See `Hedges.run`. The second attempt begins when the first has been silent for `after_s`.

        Both attempts have ended when this returns.
        """
        timer = self._timer = asyncio.get_running_loop().call_later(after_s, self._start)
        try:
            response = await self._run_first()
            timer.cancel()
            if self.second is None or self.winner is self._first:
                return response
            assert self._hedge is not None
            if self.winner is None and self._hedge.done():
                self._put_last(self._first)
                return None
            return await self._hedge
        finally:
            timer.cancel()
            if self._hedge is not None and not self._hedge.done():
                self._hedge.cancel()
                await asyncio.wait((self._hedge,))

    def won_by(self, winner: Attempt) -> None:
        """End the other attempt, because `winner` has an answer for the client."""
        self.winner = winner
        if self._timer is not None:
            self._timer.cancel()  # the answer may last longer than the wait for its first token
        self._put_last(winner)
        if winner is not self._first:
            if self._is_first_running:
                assert self._request is not None
                self._request.cancel()
        elif self._hedge is not None:
            self._hedge.cancel()

    async def _run_first(self) -> T | None:
        """Run the first attempt. Return None also if the second has won."""
        assert self._request is not None
        cancelled = self._request.cancelling()
        try:
            return await self._steps.run(self._first, self)
        except asyncio.CancelledError:
            # As in asyncio.timeout: find out whether only `won_by` cancelled the task, or the client has left too.
            if self.winner in (None, self._first) or self._request.uncancel() > cancelled:
                raise
            return None
        finally:
            self._is_first_running = False

    def _start(self) -> None:
        self._hedge = asyncio.get_running_loop().create_task(self._run_second())

    async def _run_second(self) -> T | None:
        choice = self._choose_second()
        if choice is None:
            return None
        second = self.second = self._steps.begin(choice)
        try:
            return await self._steps.run(second, self)
        except OutOfResources:
            if not self._is_first_running:
                raise
            return None  # the first attempt may not need the resource that this gateway lacks

    def _put_last(self, attempt: Attempt) -> None:
        self._attempts.sort(key=lambda other: other is attempt)
