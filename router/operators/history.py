"""The last minutes of a gateway, one point a second, for the page's curves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from router.telemetry.totals import Totals

POINTS = 300
WINDOW = 10
"""Points over which a rate or a share is computed: over one second alone it would jump."""


@dataclass(frozen=True, slots=True)
class Point:
    """The gateway at one moment. None: nothing happened that could be measured."""

    at_s: float
    """By the gateway's monotonic clock."""
    answers_per_s: float
    errors_per_s: float
    hit_rate: float | None
    """Share of the prompts' tokens that engines reused, among engines that say so."""
    expected_hit_rate: float | None
    """The same share, as expected when the requests were sent."""
    first_byte_p50_s: float | None
    first_byte_p95_s: float | None
    in_flight: int
    waiting: int


class History:
    """The last `POINTS` points, oldest first."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self._totals: deque[tuple[float, Totals]] = deque(maxlen=WINDOW + 1)

    def add(self, totals: Totals, at_s: float, *, in_flight: int, waiting: int) -> None:
        """Add a point, later than the last one."""
        self._totals.append((at_s, totals))
        since_s, since = self._totals[0]
        seconds = at_s - since_s
        tokens = {kind: count - since.tokens.get(kind, 0) for kind, count in totals.tokens.items()}
        prompt = tokens.get("prompt", 0)
        self.points.append(
            Point(
                at_s=at_s,
                answers_per_s=(totals.answers - since.answers) / seconds if seconds else 0.0,
                errors_per_s=(totals.errors - since.errors) / seconds if seconds else 0.0,
                hit_rate=tokens.get("cached", 0) / prompt if prompt else None,
                expected_hit_rate=tokens.get("predicted", 0) / prompt if prompt else None,
                first_byte_p50_s=totals.first_byte_s(since, 0.5),
                first_byte_p95_s=totals.first_byte_s(since, 0.95),
                in_flight=in_flight,
                waiting=waiting,
            )
        )

    def columns(self) -> dict[str, list[float | None]]:
        """Return all points, as a list for each value."""
        return {field.name: [getattr(point, field.name) for point in self.points] for field in fields(Point)}

    def engine_rates(self) -> dict[str, float]:
        """Return the answers a second over the window, by pod id."""
        if len(self._totals) < 2:
            return {}
        (since_s, since), (at_s, totals) = self._totals[0], self._totals[-1]
        # A pod that leaves is forgotten; if it comes back, its count begins at zero again.
        return {
            engine: max(0.0, count - since.by_engine[engine]) / (at_s - since_s)
            for engine, count in totals.by_engine.items()
        }
