"""Notices prompts that come in turn, over and over, and take more blocks than the pool has: a loop.

Every order that evicts by time or by use has just evicted each prompt when its turn comes again, so nothing is ever
hit. But most of such a loop can be hit: as much of it as stays in the pool while the rest goes past. Which part stays
does not matter.
"""

from __future__ import annotations

LOST_SHARE = 2 / 3
"""Traffic is a loop if more than this share of the blocks asked for was evicted recently, in prompts with at most one
new block. Three quarters are if prompts share a quarter of their length. Conversations bring new blocks: no loop."""
SPARED_SHARE = 3 / 4
"""The largest share of the pool that is spared. While a loop of `n` pools goes past, the rest of the pool turns over
`(n - share) / (1 - share)` times; what is spared outlasts 15 turnovers, so `n` may be up to 4."""


class Loops:
    """Decides, request by request, whether what comes back is spared. Counts are halved whenever the blocks asked for
    exceed two pools."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._asked = self._lost = 0.0

    def admitted(self, asked: int, lost: int) -> bool:
        """Count a request; return whether to spare what it brings back.

        `asked`: blocks it asked for, without hits of spared blocks. These hits do not show what the order keeps by
        itself, and counting them would end the sparing while more blocks could be spared. `lost`: how many of its
        blocks had been evicted recently if the whole prompt came back, else 0.
        """
        self._asked += asked
        self._lost += lost
        if self._asked > 2 * self._blocks:
            self._asked, self._lost = self._asked / 2, self._lost / 2
        return lost > 0 and self._asked > self._blocks and self._lost > LOST_SHARE * self._asked

    def clear(self) -> None:
        """Forget all requests."""
        self._asked = self._lost = 0.0
