"""A device in virtual time for the step loop. It checks every step, and records when the step was given, when it began
and when it ended."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.prefix_cache import PrefixCache
from engine.sched.plan import StepPlan, StepResult
from tests.engine.sched.in_order_backend import InOrderBackend


@dataclass
class Step:
    """The times of a step, in seconds on the event loop's clock."""

    plan: StepPlan
    given_s: float
    begun_s: float
    ended_s: float
    known_s: float
    """When the host has the step's tokens."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the step has ended on the device."""


class VirtualDevice:
    """Runs one step after the other, each for `step_s(number)` seconds. Its tokens keep the host busy for `host_s`.

    The device reads the pool at the end of a step, after everything that the host did meanwhile. Steps whose number,
    counted from 0, is in `failing` raise at that time.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_step_tokens: int,
        *,
        max_in_flight: int,
        step_s: Callable[[int], float] = lambda number: 0.01,
        host_s: float = 0.0,
        failing: frozenset[int] = frozenset(),
    ) -> None:
        self.max_in_flight = max_in_flight
        self.steps: list[Step] = []
        self.closed_calls = 0
        self._model = InOrderBackend(cache, max_step_tokens)
        self._step_s, self._host_s, self._failing = step_s, host_s, failing

    async def run(self, plan: StepPlan) -> StepResult:
        number, now_s = len(self.steps), asyncio.get_running_loop().time()
        before = self.steps[-1] if self.steps else None
        begun_s = max(now_s, before.ended_s) if before else now_s
        ended_s = begun_s + self._step_s(number)
        step = Step(plan, now_s, begun_s, ended_s, max(ended_s, before.known_s if before else 0) + self._host_s)
        self.steps.append(step)
        self._model.launch(plan)
        try:
            await _sleep(step.ended_s - now_s)
            if before:
                await before.is_over.wait()  # timers due at the same time fire in any order
            self._model.check_fences()
            if number in self._failing:
                raise RuntimeError("device lost")
            self._model.execute()
            step.is_over.set()
            await _sleep(step.known_s - step.ended_s)
        except BaseException:
            self._model.lose()
            raise
        finally:
            step.is_over.set()
            self.closed_calls += 1
        return self._model.land()

    async def close(self) -> None:
        """Nothing to free."""

    def idle_s(self) -> list[float]:
        """Return the idle seconds of the device between successive steps."""
        return [round(after.begun_s - before.ended_s, 9) for before, after in itertools.pairwise(self.steps)]


async def _sleep(delay_s: float) -> None:
    """Sleep. Unlike `asyncio.sleep`, this does not yield at all if the delay is 0."""
    if delay_s > 0:
        await asyncio.sleep(delay_s)
