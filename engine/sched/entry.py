"""What the scheduler stores for each request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.sequence import CachedSequence
from engine.sched.plan import PENDING, SequenceChunk
from engine.sched.request import Request


@dataclass(frozen=True, slots=True)
class Lack:
    """The blocks that a request lacked when it did not fit, and the counts at that time. New counts may make it fit."""

    blocks: int
    given_back: int
    """`BlockPool.given_back` at that time."""
    hits: int
    """Leading blocks that were cached."""
    reserve: int
    """Blocks that had to stay available for others."""

    def left(self, given_back: int, hits: int, reserve: int) -> int:
        """Return the least number of blocks that the request still lacks.

        A block helps if it was given back, can be reused now, or need not stay available any more.
        """
        return self.blocks - (given_back - self.given_back) - max(0, hits - self.hits) - (self.reserve - reserve)


@dataclass(slots=True, eq=False)
class Entry:
    """A request that waits or runs."""

    request: Request
    sequence: CachedSequence
    arrival: int
    """Order of arrival; of two requests the one with the smaller number is older."""
    computed_tokens: int = 0
    """Leading tokens whose KV is in the sequence's blocks."""
    planned_tokens: int = 0
    """Leading tokens whose KV is present or is written by a step in progress. If this number equals `known_tokens`,
    that step samples the next token."""
    prefill_end: int = 0
    """Tokens known at the latest admission: chunks before this position are prefill, later ones decode."""
    cached_tokens: int | None = None
    """Prompt tokens reused at the first admission; None before that."""
    kept_tokens: int | None = None
    """Leading prompt tokens that are pinned for the request's marks; None before its prompt is computed."""
    unkept_tokens: int = 0
    """Prompt tokens that its marks ask for but for which there was no room."""
    lack: Lack | None = None
    """What the request lacked when the last attempt to start it failed; None: no attempt has failed."""
    overtaken: int = 0
    """Number of younger requests admitted before this one."""
    told_tokens: int = 0
    """Number of known tokens that were passed to the cache."""
    is_started: bool = False
    """Whether a chunk was planned since the latest admission."""
    shown_blocks: tuple[int, ...] = ()
    """The sequence's blocks for its decode chunks: copied only when they have grown."""

    @property
    def known_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.request.prompt_tokens) + len(self.request.output_tokens)

    @property
    def is_decoding(self) -> bool:
        """Whether its prefill is over."""
        return self.computed_tokens >= self.prefill_end

    @property
    def waits_for_mask(self) -> bool:
        """Whether it stays out of the steps until the mask of its next token is ready."""
        masks = self.request.masks
        return masks is not None and masks.is_slow and not masks.is_ready(len(self.request.output_tokens))

    @property
    def may_decode_ahead(self) -> bool:
        """Whether its next token can be computed while a step is in progress."""
        request, planned = self.request, self.planned_tokens
        if planned < self.prefill_end:
            return False
        if planned < self.known_tokens:
            return not self.waits_for_mask
        if request.masks is not None and request.masks.is_slow:
            return False
        last_is_on_its_way = planned + 1 >= len(request.prompt_tokens) + request.max_tokens
        return not last_is_on_its_way and not request.sampling.reads_output

    def decode_chunk(self) -> SequenceChunk:
        """Return a chunk of one token: the last known one, or the one that the step in progress samples."""
        request, start = self.request, self.planned_tokens
        token = request.output_tokens[-1] if start < self.known_tokens else PENDING
        self.planned_tokens = start + 1
        if len(self.shown_blocks) != len(self.sequence.blocks):
            self.shown_blocks = tuple(self.sequence.blocks)
        return SequenceChunk(request, start, (token,), self.shown_blocks, True, True)

    def prefill_chunk(self, budget_tokens: int) -> SequenceChunk:
        """Return a chunk of the next tokens of the prefill, `budget_tokens` at most.

        A chunk that does not end the prefill ends at a block edge if the budget allows.
        """
        start, block_size = self.planned_tokens, self.sequence.block_size
        end = min(self.prefill_end, start + budget_tokens)
        if end < self.prefill_end:
            edge = end // block_size * block_size
            end = edge if edge > start else end
        blocks = tuple(self.sequence.blocks[: -(-end // block_size)])
        self.planned_tokens = end
        samples = end == self.prefill_end
        return SequenceChunk(self.request, start, self.tokens(start, end), blocks, samples, False, self.take_source())

    def take_source(self) -> int | None:
        """Return the block to copy rows from, for the first chunk after the admission; None for later ones."""
        is_first, self.is_started = not self.is_started, True
        return self.sequence.source if is_first else None

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known tokens at positions start .. end - 1."""
        prompt, output = self.request.prompt_tokens, self.request.output_tokens
        n = len(prompt)
        return (*prompt[start:end], *output[max(start - n, 0) : max(end - n, 0)])
