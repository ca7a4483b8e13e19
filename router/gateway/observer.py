"""The interface of an observer, which sees decisions and ended requests, but decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from router.gateway.exchange import Exchange


class Observer(Protocol):
    """Called in the path of every request, so it must not wait, and must cost almost nothing while nobody watches."""

    def wants_scores(self) -> bool:
        """Whether the next decision has to include every pod's score, which doubles its cost."""
        ...

    def scored(self, seconds: float) -> None:
        """Record the seconds that the scores took."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """Record a request that has ended, whatever its outcome."""
        ...
