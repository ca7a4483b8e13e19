"""The interface of an observer, which sees decisions and ended requests, but decides nothing."""

from __future__ import annotations

from typing import Protocol

from router.choosing.score_observer import ScoreObserver
from router.forwarding.exchange import Exchange


class Observer(ScoreObserver, Protocol):
    """Called in the path of every request, so it must not wait, and must cost almost nothing while nobody watches."""

    def ended(self, exchange: Exchange) -> None:
        """Record a request that has ended, whatever its outcome."""
        ...
