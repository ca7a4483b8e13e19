"""What the scheduler keeps of a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.sequence import CachedSequence
from engine.sched.plan import SequenceChunk
from engine.sched.request import Request


@dataclass(slots=True, eq=False)
class Entry:
    """A request that waits or runs."""

    request: Request
    sequence: CachedSequence
    arrival: int
    """Order of arrival; of two requests the one with the smaller number is older."""
    computed_tokens: int = 0
    """Leading tokens whose KV is in the sequence's blocks."""
    prefill_end: int = 0
    """Tokens known at the latest admission: up to here chunks are prefill, from here on decode."""
    cached_tokens: int | None = None
    """Prompt tokens reused at the first admission; None before."""
    overtaken: int = 0
    """Younger requests admitted before this one."""

    @property
    def known_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.request.prompt_tokens) + len(self.request.output_tokens)

    @property
    def is_decoding(self) -> bool:
        """Past its prefill."""
        return self.computed_tokens >= self.prefill_end

    def decode_chunk(self) -> SequenceChunk:
        """The last known token."""
        request, start = self.request, self.computed_tokens
        return SequenceChunk(request, start, (request.output_tokens[-1],), tuple(self.sequence.blocks), True, True)

    def prefill_chunk(self, budget_tokens: int) -> SequenceChunk:
        """The next tokens of the prefill, `budget_tokens` at most.

        A chunk that does not end the prefill ends at a block edge where the budget allows.
        """
        start, block_size = self.computed_tokens, self.sequence.block_size
        end = min(self.prefill_end, start + budget_tokens)
        if end < self.prefill_end:
            edge = end // block_size * block_size
            end = edge if edge > start else end
        blocks = tuple(self.sequence.blocks[: -(-end // block_size)])
        return SequenceChunk(self.request, start, self._tokens(start, end), blocks, end == self.prefill_end, False)

    def _tokens(self, start: int, end: int) -> tuple[int, ...]:
        prompt, output = self.request.prompt_tokens, self.request.output_tokens
        n = len(prompt)
        return (*prompt[start:end], *output[max(start - n, 0) : max(end - n, 0)])
