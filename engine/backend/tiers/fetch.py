"""Fetch or recompute: how much of what a slower tier holds is worth waiting for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.backend.tiers.base import Direction
from engine.backend.tiers.copier import BlockCopier
from engine.contract.load import StepCost


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt whose prefill is about to begin, and what computing costs (measured: `engine.sched.step_cost`)."""

    prompt_tokens: int
    cached_tokens: int
    """Leading tokens whose KV is in the pool; whole blocks."""
    step_tokens: int
    """Tokens that one step computes at most."""
    cost: StepCost
    """All zero while it is not known: then computing is taken for free, and nothing is fetched."""
    queue_s: float = 0.0
    """Until the device could begin to compute this prompt."""


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that a tier holds behind the cached tokens, and what fetching them costs (measured: `BlockCopier`)."""

    blocks: int
    """Together with the cached ones fewer tokens than the prompt: one at least is always computed."""
    block_tokens: int
    block_s: float
    """Seconds that one more block takes to fetch."""
    queue_s: float
    """Until the copies asked for already have ended."""

    @staticmethod
    def measured(copier: BlockCopier, blocks: int, block_tokens: int) -> Held | None:
        """With what the copier's own copies have taken; None before the first one, when nothing can be chosen."""
        queue_s, with_one_s = (copier.seconds_for(Direction.PROMOTE, more) for more in (0, 1))
        if queue_s is None or with_one_s is None:
            return None
        return Held(blocks, block_tokens, with_one_s - queue_s, queue_s)

    def behind(self, above: Held) -> Held:
        """The same with the way through the tiers above: a block passes each of them, so the slowest copy sets the
        pace, and theirs add to the wait for the first."""
        return Held(self.blocks, self.block_tokens, max(above.block_s, self.block_s), self.queue_s + above.block_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do, and what it is expected to take until the prefill has ended."""

    fetched_blocks: int
    """Leading blocks of those held; 0: compute all."""
    first_token_s: float
    recompute_s: float
    """The same without fetching anything."""


def choose(prefill: Prefill, held: Held) -> Choice:
    """The number of blocks to fetch that ends the prefill first; of equals the least.

    Never worse than computing all, so a slow tier, or one with a long queue, is not waited for. Asked again while a
    copy is under way, with the rates as they are then, it tells when to give the copy up.
    """
    recompute_s = first_token_s(prefill, held, 0)
    best = min(_candidates(prefill, held), key=lambda blocks: (first_token_s(prefill, held, blocks), blocks))
    return Choice(best, first_token_s(prefill, held, best), recompute_s)


def first_token_s(prefill: Prefill, held: Held, blocks: int) -> float:
    """Seconds until the prefill has ended when `blocks` are fetched first. The fetch costs nothing while it ends before
    the device is free: the copies have streams of their own."""
    begins_s = max(prefill.queue_s, held.queue_s + blocks * held.block_s) if blocks else prefill.queue_s
    return begins_s + compute_s(prefill, prefill.cached_tokens + blocks * held.block_tokens)


def compute_s(prefill: Prefill, start: int) -> float:
    """Seconds that the device takes for the prompt's tokens from `start` on, queue not included."""
    tokens, cost = prefill.prompt_tokens - start, prefill.cost
    steps = max(1.0, tokens / prefill.step_tokens)
    # The formula of `StepCost`, summed over the chunks: their attention terms telescope.
    return cost.base_s * steps + cost.token_s * tokens + cost.attention_s * tokens * (start + tokens / 2)


def _candidates(prefill: Prefill, held: Held) -> set[int]:
    """Where the minimum can lie. In blocks, `first_token_s` is concave but for two kinks: where fetching begins to take
    longer than the device's queue, and where what is left to compute fits one step. So it is at an end or a kink."""
    kinks = [(prefill.prompt_tokens - prefill.cached_tokens - prefill.step_tokens) / held.block_tokens]
    if held.block_s > 0:
        kinks.append((prefill.queue_s - held.queue_s) / held.block_s)
    near = {math.floor(kink) + i for kink in kinks if 0 <= kink <= held.blocks for i in (0, 1)}
    # The first block also pays for the queue of copies.
    return {0, held.blocks} | {blocks for blocks in near | {1} if 0 < blocks < held.blocks}
