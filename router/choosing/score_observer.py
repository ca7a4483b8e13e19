"""Who wants to see the scores of decisions."""

from __future__ import annotations

from typing import Protocol


class ScoreObserver(Protocol):
    """Called in the path of every request, so it must not wait, and must cost almost nothing while nobody watches."""

    def wants_scores(self) -> bool:
        """Whether the next decision has to include every pod's score, which doubles its cost."""
        ...

    def scored(self, seconds: float) -> None:
        """Record the seconds that the scores took."""
        ...
