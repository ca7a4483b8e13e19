"""How much time copies downwards may take from the steps of other requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STEP_SHARE = 0.01
"""Share of a step that copies may take if steps wait for the thread that plans them: the project's requirement."""
HIDDEN_SHARE = 0.25
"""The same share if a step is planned while the device runs the previous one. Planning then delays nothing until it
takes longer than that step, so the share is large; it was never measured on a card."""
PIECE_BLOCKS = 32
"""Least blocks that are copied at a time beside steps of others. Asking for a piece and processing it costs some 0.1
ms, and 2 us for each block. What arrives during a step is not used before the step ends (`bench_tier_traffic`)."""


@dataclass(frozen=True, slots=True)
class StepSharing:
    """How copies share time with the steps of other requests."""

    share: float = STEP_SHARE
    """Share of each step of others that copies downwards may take."""
    computed: Callable[[], float] | None = None
    """Returns the CPU seconds of the calling thread; None: the tiers' clock is used."""
    later: Callable[[], object] | None = None
    """Arranges that `Tiers.go_on` is called once the step that is being planned has begun; None: copies begin while it
    is planned."""


class Allowance:
    """Seconds that copies downwards may take until the next step.

    Two things count: time on the thread that plans steps, and delay of the step itself by memory traffic. Each step of
    other requests grants a share of its time. An unused rest is lost. At most one operation may overdraw, and the
    following steps pay for it. So steps in a row spend no more in all than their share and one operation. While no
    other request is computed, nothing is bounded.
    """

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        """`share`: of each step; `clock`: CPU seconds of the thread, so that other programs do not count."""
        self._share = share
        self._clock = clock
        self._left_s = math.inf

    def begin_step(self, others_s: float) -> None:
        """Note that a step of about `others_s` seconds is planned for requests that wait for no copy; 0: none do."""
        owed_s = min(0.0, self._left_s)
        self._left_s = owed_s + self._share * others_s if others_s > 0 else math.inf

    @property
    def is_bounded(self) -> bool:
        """Whether other requests are computed."""
        return self._left_s < math.inf

    @property
    def is_left(self) -> bool:
        """Whether one more operation may begin."""
        return self._left_s > 0

    @property
    def piece_blocks(self) -> int:
        """Least number of blocks that are copied at a time, if there are that many."""
        return PIECE_BLOCKS if self.is_bounded else 1

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of what runs in this context, on the thread that plans."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._spend(self._clock() - start_s)

    def move(self, blocks: int, beside_s: float) -> None:
        """Count blocks that are asked for; each makes the steps beside it take `beside_s` seconds longer."""
        self._spend(blocks * beside_s)

    def _spend(self, seconds: float) -> None:
        self._left_s -= seconds
