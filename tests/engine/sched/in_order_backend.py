"""A device that accepts a step ahead: it checks, writes and samples when told to, oldest step first.

Between `launch` and `execute` the host may do anything. `execute` finds any damage in the pool.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from engine.cache.prefix_cache import PrefixCache
from engine.sched.plan import PENDING, SequenceChunk, StepPlan, StepResult
from engine.sched.request import Request
from tests.engine.sched.checking_backend import CheckingBackend, known_tokens


class InOrderBackend(CheckingBackend):
    """Has at most two steps between `launch` and `land`."""

    def __init__(self, cache: PrefixCache, max_step_tokens: int) -> None:
        super().__init__(cache, max_step_tokens)
        self.cache = cache
        self.launched: deque[tuple[StepPlan, list[list[int]]]] = deque()
        """Steps not executed, each with the known tokens of its requests when it was launched."""
        self.executed: deque[tuple[StepPlan, StepResult]] = deque()
        """Steps that have not landed."""
        self._samplers: set[Request] = set()
        """Requests for which the latest launched step samples."""
        self._sampled: dict[Request, int] = {}
        """Tokens that the latest executed step chose: the buffer on the device."""

    @property
    def in_flight(self) -> list[StepPlan]:
        """Return the steps launched and not landed, oldest first."""
        return [*(plan for plan, _ in self.executed), *(plan for plan, _ in self.launched)]

    def launch(self, plan: StepPlan) -> None:
        assert len(self.in_flight) < 2
        for chunk in plan.chunks:
            if PENDING in chunk.tokens:
                assert tuple(chunk.tokens) == (PENDING,)
                assert chunk.decodes
                assert not chunk.request.sampling.reads_output
                assert chunk.request in self._samplers
        self._samplers = {chunk.request for chunk in plan.chunks if chunk.samples}
        self.launched.append((plan, [known_tokens(chunk.request) for chunk in plan.chunks]))

    def execute(self) -> None:
        """Run the oldest launched step."""
        assert self.launched, "the step was lost together with an earlier one"
        plan, known = self.launched.popleft()
        pairs = [self._resolve(chunk, tokens) for chunk, tokens in zip(plan.chunks, known, strict=True)]
        result = self.compute([chunk for chunk, _ in pairs], [tokens for _, tokens in pairs])
        self._sampled = {c.request: result.sampled[c.request.id].token for c in plan.chunks if c.samples}
        self.executed.append((plan, result))

    def _resolve(self, chunk: SequenceChunk, known: list[int]) -> tuple[SequenceChunk, list[int]]:
        if chunk.tokens[0] != PENDING:
            return chunk, known
        token = self._sampled[chunk.request]
        return replace(chunk, tokens=(token,)), [*known, token]

    def land(self) -> StepResult:
        """Hand the oldest step's outcome to the host."""
        return self.executed.popleft()[1]

    def lose(self) -> None:
        """Lose every step in flight; the device does not touch the pool any more."""
        self.launched.clear()
        self.executed.clear()

    def check_fences(self) -> None:
        """Check that steps in flight touch no other request's blocks, and that no block they write is published."""
        hands: dict[int, int] = {}
        for sequence in self.cache._users:
            for block in sequence.blocks:
                hands[block] = hands.get(block, 0) + 1
        for plan in self.in_flight:
            for chunk in plan.chunks:
                assert all(block in hands for block in chunk.blocks), "a block in use was given back"
                for block in chunk.blocks[chunk.start // self.size :]:
                    assert hands[block] == 1, "a block that is written has two owners"
                    assert not self.cache._indexed.digests[block], "a block was published before it was written"
