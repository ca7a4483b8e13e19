"""The one task that steps the engine: schedule, compute, hand out tokens, report the cache's changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.backend.base import Backend
from engine.cache.changes import KeyChanges
from engine.grammar.allowed import AllowedTokens
from engine.grammar.fills import MaskFills
from engine.sched.plan import StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler, TokenOutput

if TYPE_CHECKING:
    from engine.loop.metrics import EngineMetrics  # needs a package that computing alone does not need

log = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0
"""An idle loop looks for work this often even when nothing wakes it."""

MAX_FAILURES_IN_A_ROW = 8
"""After this many failed steps in a row the device is given up."""


class StepFailed(Exception):
    """The step that computed a request, or the step before that, failed; the request is lost, others go on."""


class ConstraintFailed(StepFailed):
    """The answer cannot follow its constraint any further."""


class RequestRefused(Exception):
    """A request that can never run on this engine; the text says why."""


class _NeverEnds(RuntimeError):
    """A step is beyond its deadline: the device is lost."""


class TokenStream:
    """Outputs of requests submitted together, in the order they are made. Raises StepFailed after a failed step.

    Holds at most as many outputs as the requests may generate.
    """

    def __init__(self, abort: Callable[[int], None], bound: int) -> None:
        self._abort = abort
        self._queue: asyncio.Queue[TokenOutput | StepFailed] = asyncio.Queue(bound)
        self._open: set[int] = set()
        self.taken_up_s: float | None = None
        """`time.perf_counter` when a step first included one of the requests; None before."""

    def open(self, request_id: int) -> None:
        """Expect outputs of this request."""
        self._open.add(request_id)

    def put(self, output: TokenOutput) -> None:
        """Hand over an output. Never waits: the queue has room for every token a request may generate."""
        self._queue.put_nowait(output)

    def fail(self, error: StepFailed) -> None:
        """Drop the outputs not read yet, and raise `error` at the reader's next step."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def abort(self, request_id: int) -> None:
        """End one of the requests: the stream gives none of its further outputs."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort(request_id)

    def abort_all(self) -> None:
        """End all requests that have not finished."""
        for request_id in tuple(self._open):
            self.abort(request_id)

    def __aiter__(self) -> AsyncIterator[TokenOutput]:
        return self

    async def __anext__(self) -> TokenOutput:
        while self._open:
            item = await self._queue.get()
            if isinstance(item, StepFailed):
                raise item
            if item.request_id not in self._open:
                continue
            if item.finish is not None:
                self._open.discard(item.request_id)
            return item
        raise StopAsyncIteration


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that the backend has."""

    plan: StepPlan
    result: Awaitable[StepResult]


class EngineLoop:
    """Steps the scheduler and the backend. All methods are called on the event loop.

    If the backend takes two steps, it gets the second one before the tokens of the first arrive. So the device goes on
    while the host hands out tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        *,
        on_changes: Callable[[KeyChanges], None],
        metrics: EngineMetrics,
        step_deadline_s: float,
        check_in_s: Callable[[], float] | None = None,
        fills: MaskFills | None = None,
    ) -> None:
        """`check_in_s`: returns the seconds after which an idle loop must look for work; None: `wake` suffices.
        `fills`: computes masks; without it no request may have any."""
        self._check_in_s = check_in_s or (lambda: IDLE_CHECK_S)
        self._scheduler = scheduler
        self._backend = backend
        self._on_changes = on_changes
        self._metrics = metrics
        self._flights: deque[_Flight] = deque()
        """Steps that the backend has and whose results the scheduler has not got yet, oldest first."""
        self._streams: dict[int, TokenStream] = {}
        self._fills = fills
        self._masks: dict[int, AllowedTokens] = {}
        """By request id, for open requests whose output follows a constraint."""
        self._queued_s: dict[int, float] = {}
        """Request id -> when it was queued, until a step first includes it."""
        self._failures_in_a_row = 0
        self._step_deadline_s = step_deadline_s
        self._dead = False
        self._stuck = False
        self._wake = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        """False once `run` has ended, by cancellation or by a defect; requests submitted then fail at once."""
        return not self._dead

    @property
    def is_stuck(self) -> bool:
        """Whether `run` has ended because a step never ended: the backend cannot be closed then."""
        return self._stuck

    @property
    def open_requests(self) -> int:
        """Requests submitted and not finished."""
        return len(self._streams)

    @asynccontextmanager
    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[TokenStream]:
        """Queue requests. Yields their outputs; leaving the context aborts unfinished requests.

        Raises QueueFull, RequestRefused for a request that can never run (in both cases none is queued), and
        StepFailed if the loop has ended.
        """
        if self._dead:
            raise StepFailed("the engine has stopped")
        stream = TokenStream(self._abort, bound=sum(request.max_tokens + 1 for request in requests))
        try:
            for request in requests:
                try:
                    self._scheduler.add(request)
                except ValueError as error:
                    raise RequestRefused(str(error)) from None
                self._streams[request.id] = stream
                if isinstance(request.masks, AllowedTokens):
                    self._masks[request.id] = request.masks
                self._queued_s[request.id] = time.perf_counter()
                stream.open(request.id)
            self._wake.set()
            yield stream
        finally:
            stream.abort_all()

    def wake(self) -> None:
        """Make an idle loop look for work."""
        self._wake.set()

    def reset_cache(self) -> int:
        """Forget all cached prefixes, and publish that. Return the number of freed blocks. Running requests go on."""
        freed = self._scheduler.reset_cache()
        self._publish()
        return freed

    async def run(self) -> None:
        """Step until cancelled.

        A failed step ends the requests in it and in the step queued behind it. A defect of the loop itself ends `run`.
        Raises RuntimeError after `MAX_FAILURES_IN_A_ROW` failed steps, with the last step's error as its cause. Also
        raises RuntimeError if a step misses its deadline, which is counted from the end of the step before it.
        """
        try:
            while True:
                await self._turn()
        except _NeverEnds as error:
            self._metrics.steps.failures.inc()
            self._fail(list(self._streams), str(error))
            raise
        finally:
            self._dead = True
            self._fail(list(self._streams), "the engine has stopped")
            await self._drop_flights()

    async def _turn(self) -> None:
        while len(self._flights) < self._backend.max_in_flight and await self._launch():
            pass
        if self._flights:
            await self._land()
        else:
            await self._idle()

    async def _launch(self) -> bool:
        """Give the backend a step. Return False if there is no step to give now."""
        self._scheduler.advance(asyncio.get_running_loop().time())
        plan = self._scheduler.schedule_ahead() if self._flights else self._scheduler.schedule()
        self._publish()
        if plan is None:
            return False
        self._observe_queue(plan)
        run = self._backend.run(plan)
        if self._backend.max_in_flight == 1:
            self._flights.append(_Flight(plan, run))
        else:
            self._flights.append(_Flight(plan, asyncio.create_task(run)))
            await asyncio.sleep(0)  # lets `run` begin before the previous step's tokens are added to their requests
        return True

    async def _land(self) -> None:
        """Wait for the oldest step, and hand out its tokens."""
        flight = self._flights.popleft()
        plan = flight.plan
        try:
            async with self._deadline():
                result = await flight.result
            outputs = self._follow(self._scheduler.complete(result))
        except _NeverEnds:
            raise
        except Exception as error:
            log.exception("a step of %d chunks failed", len(plan.chunks))
            await self._give_up(f"the step that computed this request failed: {error}")
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise RuntimeError(f"{self._failures_in_a_row} steps in a row have failed") from error
        else:
            self._failures_in_a_row = 0
            self._metrics.observe_step(
                elapsed_s=result.elapsed_s,
                prefill_tokens=sum(len(chunk.tokens) for chunk in plan.chunks if not chunk.decodes),
                sampled_tokens=len(outputs),
            )
            for output in outputs:
                self._deliver(output)
        self._publish()
        # A backend that answers without waiting must not keep the server from reading and writing.
        await asyncio.sleep(0)

    async def _give_up(self, reason: str) -> None:
        """Wait for the steps behind the failed one, because the backend may still use their blocks. Then fail the
        requests of all these steps."""
        for flight in self._flights:
            for chunk in flight.plan.chunks:
                self._drop_masks(chunk.request.id)  # the step may wait for a mask that is never computed
        async with self._deadline():
            await asyncio.gather(*[flight.result for flight in self._flights], return_exceptions=True)
        self._flights.clear()
        self._metrics.steps.failures.inc()
        self._fail(self._scheduler.fail_step(), reason)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Limit the wait for a step. Raises _NeverEnds."""
        try:
            async with asyncio.timeout(self._step_deadline_s) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise  # a TimeoutError of the backend itself
            self._stuck = True
            raise _NeverEnds(f"a step has not ended within {self._step_deadline_s:g} s") from None

    async def _drop_flights(self) -> None:
        calls = [asyncio.ensure_future(flight.result) for flight in self._flights]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _idle(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(min(IDLE_CHECK_S, self._check_in_s())):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _observe_queue(self, plan: StepPlan) -> None:
        """Record the waiting times of the requests that are in a step for the first time."""
        if not self._queued_s:
            return
        now_s = time.perf_counter()
        for chunk in plan.chunks:
            queued_s = self._queued_s.pop(chunk.request.id, None)
            if queued_s is not None:
                self._metrics.requests.queue.observe(now_s - queued_s)
                stream = self._streams.get(chunk.request.id)
                if stream is not None and stream.taken_up_s is None:
                    stream.taken_up_s = now_s

    def _follow(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Begin to compute the masks after these tokens. Return the outputs of requests that follow their constraint;
        the others end."""
        if not self._masks:
            return outputs
        pushed: list[tuple[AllowedTokens, int]] = []
        failed: dict[int, str] = {}
        for output in outputs:
            masks = self._masks.get(output.request_id)
            if masks is None:
                continue
            if masks.failure is not None:
                failed[output.request_id] = masks.failure
            elif output.finish is not None or output.token is None:
                self._drop_masks(output.request_id)
            else:
                pushed.append((masks, output.token.token))
        if self._fills is not None:
            self._fills.begin(pushed)
        for request_id, reason in failed.items():
            self._scheduler.abort(request_id)
            self._fail((request_id,), reason, ConstraintFailed)
        return [output for output in outputs if output.request_id not in failed] if failed else outputs

    def _drop_masks(self, request_id: int) -> None:
        """Compute no more masks for a request. A step that still has it need not wait for one."""
        masks = self._masks.pop(request_id, None)
        if masks is not None:
            masks.end()

    def _deliver(self, output: TokenOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish is not None:
            del self._streams[output.request_id]
        stream.put(output)

    def _fail(self, request_ids: Sequence[int], reason: str, kind: type[StepFailed] = StepFailed) -> None:
        for request_id in request_ids:
            self._queued_s.pop(request_id, None)
            self._drop_masks(request_id)
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.fail(kind(reason))

    def _publish(self) -> None:
        changes = self._scheduler.take_changes()
        if changes.removed or changes.stored:
            self._on_changes(changes)

    def _abort(self, request_id: int) -> None:
        self._queued_s.pop(request_id, None)
        self._drop_masks(request_id)
        if self._streams.pop(request_id, None) is not None:
            self._scheduler.abort(request_id)
