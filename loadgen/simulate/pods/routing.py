"""The interface between the simulated fleet and the router of its requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.keys import PrefixKey
from loadgen.simulate.pods.pod import Report

HELD = ""
"""Returned by a router that keeps the request; the router sends it later with `Simulation.send`."""


@dataclass(slots=True, eq=False)
class Offered:
    """A request as a router may see it. A retried request keeps its number."""

    number: int
    session: int
    tokens: array[int]
    """Token ids of the prompt; each stands for 4 bytes of text."""
    keys: tuple[PrefixKey, ...]
    """warmroute's prefix keys."""
    output_tokens: int
    """`max_tokens` of the request; the answer has this length."""
    user_start: int = 0
    """Index of the first token of the first user message."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """A pod's metrics endpoint at one moment."""

    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks that running requests hold, 0 to 1."""


class Router(Protocol):
    """One gateway. It knows only what these methods tell it. All times are on the simulation's clock."""

    name: str
    scrape_s: float
    """Period in which the router reads the pods' metrics; 0: never."""
    takes_reports: bool
    """Whether the router subscribes to pods' reports."""

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """Take the pods that discovery shows from now on, in stable order."""
        ...

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """Return the pod to which the request is sent at once; None: no pod is left; `HELD`: later."""
        ...

    def first_token(self, request: Offered, pod: str, cached_tokens: int, now_s: float) -> None:
        """Note that the answer's first token passed."""
        ...

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """Note that the answer ended, or that the pod could not be reached."""
        ...

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """Take a pod's report, which has just arrived."""
        ...

    def scraped(self, pod: str, scrape: Scrape, now_s: float) -> None:
        """Take the pod's metrics, as they were when the pod answered."""
        ...
