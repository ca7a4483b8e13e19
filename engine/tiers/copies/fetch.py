"""Fetch or recompute: decides how many blocks of a slower tier are worth waiting for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.contract.load import StepCost
from engine.tiers.copies.base import Direction
from engine.tiers.copies.copier import BlockCopier

_SHORTEST_S = 1e-6
"""Other requests' steps that take less time are ignored."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt whose prefill is about to begin, and the cost of computing (measured by `engine.sched.step_cost`)."""

    prompt_tokens: int
    cached_tokens: int
    """Leading tokens whose KV is in the pool; whole blocks."""
    step_tokens: int
    """The most tokens that one step computes."""
    cost: StepCost
    """All zero while it is unknown: then computing counts as free, and nothing is fetched."""
    queue_s: float = 0.0
    """Seconds until the device could begin to compute this prompt."""
    next_s: float = 0.0
    """Seconds of the next step of other requests. If the prompt does not begin in that step, it begins after that step
    at the soonest. 0: there is no such step, and the prompt can begin at any time."""
    further_s: float = 0.0
    """Seconds of each step of other requests after that one."""
    least_s: float = 0.0
    """Seconds of the shortest possible step."""

    def begins_s(self, ready_s: float) -> float:
        """Return the seconds until the device begins to compute the prompt if its blocks arrive after `ready_s`. A step
        of other requests is not interrupted."""
        if ready_s > self.next_s and self.further_s >= _SHORTEST_S:
            steps = math.ceil((ready_s - self.next_s) / self.further_s - 1e-9)
            ready_s = self.next_s + steps * self.further_s
        elif ready_s > 0:
            ready_s = max(ready_s, self.next_s)
        return max(self.queue_s, ready_s)


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that a tier holds after the cached tokens, and the cost of fetching (measured by `BlockCopier`)."""

    blocks: int
    """With the cached tokens they have fewer tokens than the prompt: at least one token is always computed."""
    block_tokens: int
    block_s: float
    """Seconds to fetch one more block."""
    queue_s: float
    """Seconds until the copies already requested have ended."""

    @staticmethod
    def measured(copier: BlockCopier, blocks: int, block_tokens: int, ahead: int = 0) -> Held | None:
        """Return the blocks with the copier's measured cost; None before its first copy, when the cost is unknown.

        `ahead`: blocks that will be requested before these, besides those requested already.
        """
        queue_s, with_one_s = (copier.seconds_for(Direction.PROMOTE, ahead + more) for more in (0, 1))
        if queue_s is None or with_one_s is None:
            return None
        return Held(blocks, block_tokens, with_one_s - queue_s, queue_s)

    def behind(self, above: Held) -> Held:
        """Return the same blocks, fetched through the tiers above. A block passes each tier, so the slowest copy sets
        the pace, and the copies above add to the wait for the first block."""
        return Held(self.blocks, self.block_tokens, max(above.block_s, self.block_s), self.queue_s + above.block_s)


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """The number of blocks to fetch, and the expected seconds until the prefill has ended."""

    fetched_blocks: int
    """Number of leading held blocks to fetch; 0: compute all."""
    first_token_s: float
    recompute_s: float
    """Expected seconds without a fetch."""


def choose(prefill: Prefill, held: Held) -> FetchChoice:
    """Return the number of blocks to fetch that ends the prefill first; in a tie the fewest.

    The choice is never worse than computing all, so it does not wait for a slow tier or a long queue. A further call
    during the copy, with the rates at that time, tells when to give the copy up.
    """
    recompute_s = first_token_s(prefill, held, 0)
    best = min(_candidates(prefill, held), key=lambda blocks: (first_token_s(prefill, held, blocks), blocks))
    return FetchChoice(best, first_token_s(prefill, held, best), recompute_s)


def first_token_s(prefill: Prefill, held: Held, blocks: int) -> float:
    """Return the seconds until the prefill has ended if `blocks` are fetched first. A fetch that ends before the device
    is free costs no time, because copies have their own streams."""
    begins_s = prefill.begins_s(held.queue_s + blocks * held.block_s) if blocks else prefill.queue_s
    return begins_s + compute_s(prefill, prefill.cached_tokens + blocks * held.block_tokens)


def compute_s(prefill: Prefill, start: int) -> float:
    """Return the seconds that the device takes for the prompt's tokens from `start` on, without the queue."""
    tokens, cost = prefill.prompt_tokens - start, prefill.cost
    steps = max(1.0, tokens / prefill.step_tokens)
    # The formula of `StepCost`, summed over the chunks: their attention terms telescope.
    seconds = cost.base_s * steps + cost.token_s * tokens + cost.attention_s * tokens * (start + tokens / 2)
    return max(seconds, prefill.least_s)


def _candidates(prefill: Prefill, held: Held) -> set[int]:
    """Return the numbers of blocks at which the minimum can lie. As a function of blocks, `first_token_s` is concave
    except at some kinks: where fetching begins to take longer than the device's queue or next step, where the rest fits
    one step, and where the rest is so little that the step gets no shorter (ignoring attention). So the minimum is at
    an end or a kink."""
    kinks = [(prefill.prompt_tokens - prefill.cached_tokens - prefill.step_tokens) / held.block_tokens]
    if prefill.least_s > prefill.cost.base_s and prefill.cost.token_s:
        least_tokens = (prefill.least_s - prefill.cost.base_s) / prefill.cost.token_s
        kinks.append((prefill.prompt_tokens - prefill.cached_tokens - least_tokens) / held.block_tokens)
    if held.block_s > 0:
        kinks += [(at_s - held.queue_s) / held.block_s for at_s in (prefill.queue_s, prefill.next_s)]
    near = {math.floor(kink) + i for kink in kinks if 0 <= kink <= held.blocks for i in (0, 1)}
    # The first block also waits for the queue of copies.
    ends = {0, held.blocks} | {blocks for blocks in near | {1} if 0 < blocks < held.blocks}
    return ends | _before_steps(prefill, held, ends)


def _before_steps(prefill: Prefill, held: Held, ends: set[int]) -> set[int]:
    """Return how many blocks have arrived at certain times. For each number in `ends`, these are the last end of a step
    of other requests before that many blocks have arrived, and the first such end afterwards. A block that arrives
    during such a step is not used before the step ends."""
    if prefill.further_s < _SHORTEST_S or held.block_s <= 0:
        return set()
    found: set[int] = set()
    for blocks in ends:
        steps = math.floor((held.queue_s + blocks * held.block_s - prefill.next_s) / prefill.further_s)
        for step in (steps, steps + 1):
            at_s = prefill.next_s + max(0, step) * prefill.further_s
            found.add(math.floor(min(held.blocks, max(0.0, (at_s - held.queue_s) / held.block_s + 1e-9))))
    return found
