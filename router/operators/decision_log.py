"""Decisions as they happen, a few of each second, with the scores that led to them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from router.forwarding.exchange import Exchange
from router.views.types import PodScore

KEPT = 40
PER_S = 10
"""Requests kept per second: as many as a person can read."""
SCORES_S_PER_S = 0.005
"""Seconds of each second that scores may take. One decision may exceed this; later ones then have no scores."""
SHOWN_SCORES = 6
"""Number of best scores shown for a decision, besides the chosen pod's."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A request that has ended, and how its pod was chosen. None: not known, or there is none."""

    number: int
    ended_s: float
    """By the gateway's monotonic clock."""
    request_id: str
    tenant: str
    model: str
    policy: str
    pod: str
    status: int
    attempts: int
    prompt_tokens: int
    """Estimated if the engine did not say."""
    expected_cached_tokens: int
    cached_tokens: int | None
    expected_ttft_s: float | None
    first_byte_s: float | None
    """Seconds since the request was sent to the pod."""
    waited_s: float | None
    """Seconds from its arrival until it was sent."""
    scores: tuple[PodScore, ...]
    """The best scores and the chosen pod's, best first; empty if they were not requested."""


class DecisionLog:
    """The last `KEPT` decisions. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.kept: deque[Decided] = deque(maxlen=KEPT)
        self.seen = 0
        """Requests that were offered, kept or not."""
        self._second_s = -math.inf
        self._taken = self._scored = 0
        """In this second: requests kept, and decisions with scores."""
        self._spent_s = self._spent_at_s = 0.0

    def clear(self) -> None:
        """Forget all."""
        self.kept.clear()

    def wants_scores(self, now_s: float) -> bool:
        """Return whether this second still has room for scores, by their number and by their time."""
        self._begin(now_s)
        self._spent_s = max(0.0, self._spent_s - SCORES_S_PER_S * (now_s - self._spent_at_s))
        self._spent_at_s = now_s
        return self._scored < PER_S and self._spent_s < SCORES_S_PER_S

    def scored(self, seconds: float) -> None:
        """Note that a decision's scores took `seconds`."""
        self._scored += 1
        self._spent_s += seconds

    def _begin(self, now_s: float) -> None:
        if now_s - self._second_s >= 1.0:
            self._second_s, self._taken, self._scored = now_s, 0, 0

    def add(self, exchange: Exchange, now_s: float) -> None:
        """Offer a request that has ended. At most PER_S are kept each second, and only half as many of those without
        scores and without an error of the server."""
        self.seen += 1
        last, inbound = exchange.last, exchange.inbound
        if last is None or inbound is None:
            return
        self._begin(now_s)
        choice = last.choice
        tells_more = bool(choice.decision.scores) or (exchange.status or 500) >= 500
        if self._taken >= (PER_S if tells_more else PER_S // 2):
            return
        self._taken += 1
        first_byte_s = exchange.first_byte_s
        self.kept.append(
            Decided(
                number=self.seen,
                ended_s=now_s,
                request_id=exchange.arrival.request_id,
                tenant=exchange.arrival.tenant.name,
                model=inbound.model,
                policy=choice.policy,
                pod=choice.pod.pod_id,
                status=exchange.status or 500,
                attempts=len(exchange.attempts),
                prompt_tokens=exchange.usage.prompt_tokens or inbound.prompt_tokens,
                expected_cached_tokens=choice.cached_tokens,
                cached_tokens=exchange.usage.cached_tokens,
                expected_ttft_s=choice.decision.predicted_ttft_s,
                first_byte_s=None if first_byte_s is None else first_byte_s - last.sent_s,
                waited_s=last.sent_s - exchange.arrival.arrived_s,
                scores=_best(choice.decision.scores, choice.pod.pod_id),
            )
        )


def _best(scores: tuple[PodScore, ...], chosen: str) -> tuple[PodScore, ...]:
    ranked = sorted(scores, key=lambda score: score.score)
    return tuple(score for i, score in enumerate(ranked) if i < SHOWN_SCORES or score.pod_id == chosen)
