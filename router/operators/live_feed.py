"""The gateway's state for viewers: one frame a second, made once for all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from engine.contract.errors import Unavailable
from router.edge.admission import Admission
from router.forwarding.exchange import Exchange
from router.operators.decision_log import DecisionLog
from router.operators.history import History
from router.operators.hot_prefixes import HotPrefixes
from router.operators.snapshot import Snapshots, shadow_rows
from router.telemetry.metrics import Metrics

EVERY_S = 1.0
MOST_VIEWERS = 16
SHOWN_PREFIXES = 12
PREFIXES_EVERY = 3
"""Frames between two searches for the hottest prefixes, because a search looks at all counted keys."""


class TooManyViewers(Unavailable):
    """503: the number of viewers is bounded."""

    def __init__(self) -> None:
        super().__init__(f"{MOST_VIEWERS} others are watching: close one of them", code="viewers", retry_after_s=5.0)


class Live:
    """An Observer of the gateway that makes the frames. Without viewers it sees no request, and costs one point of the
    history a second."""

    def __init__(
        self,
        snapshots: Snapshots,
        metrics: Metrics,
        admission: Admission,
        *,
        about: Mapping[str, Any],
        observe: Callable[[Live | None], None],
    ) -> None:
        """`about`: facts about the gateway for every first frame. `observe`: is called with this object once somebody
        watches, so that it gets decisions and requests, and with None once nobody does."""
        self._snapshots = snapshots
        self._metrics = metrics
        self._admission = admission
        self._about = about
        self._observe = observe
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()
        self._totals = metrics.totals()
        """Totals at the last point."""
        self._history = History()
        self._history.add(self._totals, self._started_s, in_flight=0, waiting=0)
        self._prefixes = HotPrefixes()
        self._hottest: list[dict[str, Any]] = []
        self._decisions = DecisionLog()
        self._shown = 0
        """Number of the last decision that was in a frame."""
        self._viewers = 0
        self._frames = 0
        self._frame = b""
        self._is_made = asyncio.Event()
        """Set when the next frame is made, and then replaced."""

    # -- what the gateway reports -----------------------------------------------------------------------------

    def wants_scores(self) -> bool:
        """See Observer."""
        return self._decisions.wants_scores(self._clock())

    def scored(self, seconds: float) -> None:
        """See Observer."""
        self._decisions.scored(seconds)

    def ended(self, exchange: Exchange) -> None:
        """See Observer."""
        now_s = self._clock()
        self._decisions.add(exchange, now_s)
        if (inbound := exchange.inbound) is not None:
            self._prefixes.add(inbound.model, inbound.keys, inbound.tokens_per_stride, now_s)

    # -- what viewers get -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Count a viewer while the block lasts. Raises TooManyViewers."""
        if self._viewers >= MOST_VIEWERS:
            raise TooManyViewers
        self._viewers += 1
        self._observe(self)
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._observe(None)
                self._prefixes.clear()
                self._decisions.clear()
                self._hottest = []

    def first_frame(self) -> bytes:
        """Return JSON of the whole state, including the curves and decisions so far."""
        state = self._state() | {
            "about": self._about,
            "history": self._history.columns(),
            "decisions": list(self._decisions.kept),
        }
        return orjson.dumps(state)

    @property
    def number(self) -> int:
        """Number of the last frame that was made."""
        return self._frames

    async def next_frame(self, after: int) -> tuple[int, bytes, bool]:
        """Wait for a frame with a number above `after`; one is made every `EVERY_S`. Return its number, its JSON, and
        whether it is the whole state.

        A viewer gets what changed; one that has missed frames gets the whole state.
        """
        while self._frames <= after:
            await self._is_made.wait()
        if self._frames > after + 1:
            return self._frames, self.first_frame(), True
        return self._frames, self._frame, False

    async def run(self) -> None:
        """Make frames until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self._tick()

    def _tick(self) -> None:
        now_s = self._clock()
        waiting = sum(self._snapshots.waiting_by_model().values())
        self._totals = self._metrics.totals()
        self._history.add(self._totals, now_s, in_flight=self._admission.in_flight, waiting=waiting)
        if not self._viewers:
            return
        if self._frames % PREFIXES_EVERY == 0:
            self._hottest = self._snapshots.prefixes(self._prefixes.hottest(SHOWN_PREFIXES, now_s))
        self._frames += 1
        new = [decided for decided in self._decisions.kept if decided.number > self._shown]
        self._shown = self._decisions.seen
        self._frame = orjson.dumps(self._state() | {"point": self._history.points[-1], "decisions": new})
        self._is_made.set()
        self._is_made = asyncio.Event()

    def _state(self) -> dict[str, Any]:
        now_s = self._clock()
        return {
            "at_s": now_s,
            "uptime_s": now_s - self._started_s,
            "is_draining": self._admission.is_draining,
            "pods": self._snapshots.pods(self._history.engine_rates(), now_s),
            "waiting": self._snapshots.waiting(),
            "prefixes": self._hottest,
            "shadows": shadow_rows(self._totals),
        }
