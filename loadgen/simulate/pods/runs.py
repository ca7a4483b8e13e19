"""The engine's scheduler with runs of decode steps. Planning every single step would take most of a simulation's
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.sched.output import TokenOutput
from engine.sched.plan import SampledToken, StepPlan
from engine.sched.scheduler import Scheduler


class RunScheduler(Scheduler):
    """Schedules runs of steps. A run has the same effect as its steps one by one. `complete_run` ends it."""

    run_steps = 1
    """Number of equal steps that the current one stands for, including itself."""
    _most_steps = 1

    def schedule_run(self, max_steps: int) -> StepPlan | None:
        """Start the next step and return it; None in the cases of `schedule`.

        If the step only decodes and nothing waits, it stands for a run of up to `max_steps` steps. The run ends when a
        request reaches its length. If the free blocks do not suffice for the whole run, it is one step."""
        self._most_steps = max_steps
        try:
            return self.schedule()
        finally:
            self._most_steps = 1

    def _steps_of(self, plan: StepPlan) -> int:
        self.run_steps = self._run_length(plan, self._most_steps)
        return self.run_steps

    def complete_run(self, tokens: Mapping[int, Sequence[int]], elapsed_s: float) -> list[TokenOutput]:
        """End the current run, perhaps early. `tokens` has for each request as many tokens as steps were made.

        Returns the last token of each request that was not aborted meanwhile. Raises ValueError for more steps than
        planned, unequal counts, or a stop token that is not the last; then the run is still in progress.
        """
        plan = self._require_step()
        alive = [(entry, tokens[chunk.request.id]) for chunk in plan.chunks if (entry := self._entry_of(chunk))]
        steps = len(alive[0][1]) if alive else 1
        for entry, new in alive:
            stops = entry.request.stop_token_ids
            if not 0 < len(new) == steps <= self.run_steps or (stops and not stops.isdisjoint(new[:-1])):
                raise ValueError(f"request {entry.request.id}: {len(new)} tokens for a run of {self.run_steps} steps")
        self._end_oldest_step()
        self._observe(plan, elapsed_s / steps, steps)
        block_size = self._cache.block_size
        # All requests take their blocks before any request gives blocks back, as in single steps: a step takes its
        # blocks when it begins, and answers end after it.
        for entry, new in alive:
            entry.request.output_tokens.extend(new)
            known = entry.known_tokens
            if known - 1 > len(entry.sequence.blocks) * block_size:
                self._cache.extend(entry.sequence, known - 1)
        for entry, _ in alive:
            known = entry.known_tokens
            if known // block_size > entry.told_tokens // block_size:
                self._digest(entry, known)
            self._commit(entry, steps)
            entry.planned_tokens = entry.computed_tokens
        outputs = [self._output(entry, SampledToken(new[-1])) for entry, new in alive]
        self._count(steps=steps, generated_tokens=steps * len(outputs))
        return outputs

    def prefills(self) -> list[tuple[int, int]]:
        """Return for each request in prefill the tokens still to be computed and all known tokens."""
        return [
            (entry.prefill_end - entry.computed_tokens, entry.prefill_end)
            for entry in self._running
            if not entry.is_decoding
        ]

    def _run_length(self, plan: StepPlan, max_steps: int) -> int:
        """Return how many equal steps follow until a request may end; 1 if blocks are missing, a request waits or the
        step has a prefill."""
        chunks = plan.chunks
        if max_steps == 1 or self._waiting or not all(chunk.decodes for chunk in chunks):
            return 1
        left = min(chunk.request.max_tokens - len(chunk.request.output_tokens) for chunk in chunks)
        steps = min(left, max_steps)
        missing = sum(self._cache.blocks_for(chunk.start + steps) - len(chunk.blocks) for chunk in chunks)
        return steps if missing <= self._cache.pool.available else 1
