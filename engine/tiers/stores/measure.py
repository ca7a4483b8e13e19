"""How fast a store's copies are, measured before anything is in it."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.tiers.copies.base import BlockPair, CopyError, FinishedCopy
from engine.tiers.copies.copier import BlockCopier

_POLL_S = 50e-6


def drain(copier: BlockCopier, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> list[FinishedCopy]:
    """Poll until no copy is open, and return the ended copies. Raises TimeoutError after `deadline_s` seconds.

    It blocks the thread: use it for shutting down and for measuring, not on the event loop. A copy that waits for a
    step times out unless the step's end is reported.
    """
    until_s = clock() + deadline_s
    finished = copier.poll()
    while copier.open_copies:
        if clock() >= until_s:
            raise TimeoutError(f"{copier.open_copies} copies of KV blocks have not ended within {deadline_s} s")
        time.sleep(_POLL_S)
        finished += copier.poll()
    return finished


def measure_rates(copier: BlockCopier, blocks: int, deadline_s: float) -> None:
    """Learn both directions' rates from real copies: pool blocks 0 .. blocks - 1 to the host slots of the same numbers
    and back. Call it at the start, while both are empty: without a rate nothing is fetched, and without a fetch no rate
    is measured."""
    pairs = [BlockPair(i, i) for i in range(blocks)]
    for request in (copier.demote, copier.promote):
        request(pairs)
        failed = [end.error for end in drain(copier, deadline_s) if end.error is not None]
        if failed:
            raise CopyError(failed[0])
