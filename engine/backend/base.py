"""The seam between scheduling and computing."""

from __future__ import annotations

from typing import Protocol

from engine.sched.plan import StepPlan, StepResult


class Backend(Protocol):
    """Computes steps over one pool of KV blocks. One step at a time."""

    async def run(self, plan: StepPlan) -> StepResult:
        """Write the KV of every chunk's tokens into its blocks and choose the next token where a chunk samples.

        Cancelling the caller does not stop a step that has begun; `close` waits for it.
        """

    async def close(self) -> None:
        """Free what the backend holds, after the step in progress."""
