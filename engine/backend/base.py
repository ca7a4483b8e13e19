"""The seam between scheduling and computing."""

from __future__ import annotations

from typing import Protocol

from engine.sched.plan import StepPlan, StepResult


class Backend(Protocol):
    """Computes steps over one pool of KV blocks, in the order in which they are given."""

    @property
    def max_in_flight(self) -> int:
        """1: `run` is called only after the call before it has returned. 2: once more before that.

        With 2, a decode chunk may carry `PENDING`, and a step sees in the pool what the one before it wrote: the device
        does them one after the other. Calls return in order. A step may hold a request that has ended meanwhile; its
        token is asked for and then ignored.
        """

    async def run(self, plan: StepPlan) -> StepResult:
        """Copy the rows of which chunks name the `source`, write the KV of every chunk's tokens into its blocks, and
        choose the next token where a chunk samples.

        Cancelling the caller does not stop a step that has begun; `close` waits for it. What raises has ended: it
        touches the pool no more.
        """

    async def close(self) -> None:
        """Free what the backend holds, after the steps in progress."""
