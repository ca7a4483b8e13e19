"""The seam between the simulated fleet and whatever routes its requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.keys import PrefixKey
from loadgen.simulate.pod import Report

HELD = ""
"""Answer of a router that keeps the request; it sends it later by `Simulation.send`."""


@dataclass(slots=True, eq=False)
class Offered:
    """A request as a router may see it. One that is retried keeps its number."""

    number: int
    session: int
    tokens: array[int]
    """Token ids of the prompt, 4 bytes of text each."""
    keys: tuple[PrefixKey, ...]
    """warmroute's prefix keys."""
    output_tokens: int
    """`max_tokens` of the request; the answer is as long."""
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
    """One gateway. It knows what it is told here and nothing else; every time is on the simulation's clock."""

    name: str
    scrape_s: float
    """Period in which it reads the pods' metrics; 0: never."""
    takes_reports: bool
    """Whether it subscribes to what pods publish."""

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """The pods that discovery shows from here on, in stable order."""
        ...

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """The pod for the request, which is sent there at once; None: no pod is left; `HELD`: later."""
        ...

    def first_token(self, request: Offered, pod: str, cached_tokens: int, now_s: float) -> None:
        """The answer's first token passed."""
        ...

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """The answer ended, or the pod could not be reached."""
        ...

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """What a pod published has arrived."""
        ...

    def scraped(self, pod: str, scrape: Scrape, now_s: float) -> None:
        """The pod's metrics, as they were when it answered."""
        ...
