"""Somebody who looks on: told of decisions and of requests that have ended, and asked nothing about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from router.gateway.exchange import Exchange


class Observer(Protocol):
    """Called on the way of every request, so it waits for nothing and costs next to nothing while nobody looks."""

    def wants_scores(self) -> bool:
        """Whether the next decision is to be made with every pod's score, which costs about as much again."""
        ...

    def scored(self, seconds: float) -> None:
        """So long the scores took."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """A request has ended, whatever came of it."""
        ...
