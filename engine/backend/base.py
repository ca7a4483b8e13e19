"""The seam between scheduling and computing."""

from __future__ import annotations

from typing import Protocol

from engine.sched.plan import StepPlan, StepResult


class Backend(Protocol):
    """Computes steps over one pool of KV blocks, in the order in which it gets them."""

    @property
    def max_in_flight(self) -> int:
        """The most calls of `run` at a time: 1, or 2.

        With 2, a decode chunk may carry `PENDING`, and a step sees the KV that the step before it wrote: the device
        computes them one after the other. Calls return in order. A step may hold a request that has ended meanwhile;
        its token is computed and then ignored.
        """

    async def run(self, plan: StepPlan) -> StepResult:
        """Copy the rows of chunks with a `source`, write the KV of every chunk's tokens into its blocks, and choose the
        next token of each chunk that samples.

        Cancelling the caller does not stop a step that has begun; `close` waits for it. A step that raises has ended
        and no longer touches the pool.
        """

    async def close(self) -> None:
        """Free the backend's resources, after the steps in progress."""
