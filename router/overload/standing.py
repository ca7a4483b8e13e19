"""A queue that stands: requests wait longer than they should, and not only for the length of a burst. Pure.

A burst fills a queue that then empties. If more comes than the pods can do, the queue never empties: then it only adds
the same wait to every request, until all first tokens come too late to be of use. CoDel (Nichols and Jacobson, ACM
Queue 2012; RFC 8289) tells the two apart by the least wait over an interval, and so does this. While a queue stands, a
request whose first token would come too late is refused, so that those that are let go are still in time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

GOAL_S = 1.0
OWN_TIMES = 4.0
"""Without a goal of its own, a request's first token should come within GOAL_S plus OWN_TIMES times what its prompt
takes on the fastest pod: long prompts and slow pods get more time."""
EASY_SHARE = 0.5
"""A request that waited less than this share of its goal shows that the queue does not stand."""
INTERVALS = 2.0
"""A queue stands after this many goals without such a request. A shorter burst is served whole."""
HOLDS_S = 10.0
"""A queue counts as standing for this long after it last stood. What was refused makes waits short for a moment; with
the next burst taken whole, the queue would swing between empty and too long."""


@dataclass(frozen=True, slots=True)
class Goal:
    """When the first token of a request should come. `ttft_s`: seconds from its arrival; infinite: whenever it can."""

    ttft_s: float
    own_s: float
    """Seconds that its prompt takes on the fastest pod."""

    @property
    def longest_wait_s(self) -> float:
        """Return how long it may wait in the queue."""
        return max(0.0, self.ttft_s - self.own_s)


NO_GOAL = Goal(math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals that are configured, in seconds from a request's arrival to its first token; 0: no goal."""

    gateway_s: float | None = None
    """For models without a goal of their own; None: by what each prompt takes (`goal_of`)."""
    by_model_s: Mapping[str, float] = field(default_factory=dict)

    def of(self, model: str, tenant_s: float | None) -> float | None:
        """Return the goal of a tenant's requests for a model. `tenant_s`: the tenant's own, which goes first."""
        return tenant_s if tenant_s is not None else self.by_model_s.get(model, self.gateway_s)


def goal_of(own_s: float, wanted_s: float | None) -> Goal:
    """Return the goal of a request. `wanted_s`: seconds that are configured; None: none are; 0: no goal."""
    if wanted_s == 0:
        return Goal(math.inf, own_s)
    return Goal(GOAL_S + OWN_TIMES * own_s if wanted_s is None else wanted_s, own_s)


class Standing:
    """Whether one queue stands. Every time is seconds of one monotonic clock, passed in."""

    __slots__ = ("_since_s", "_until_s")

    def __init__(self) -> None:
        self._since_s = math.inf
        """When the first of the requests left that all waited long; infinite: the last one did not."""
        self._until_s = -math.inf
        """The queue counts as standing until then, whatever follows."""

    def left(self, waited_s: float, goal: Goal, now_s: float) -> None:
        """Note that a request left the queue, for a pod or because its time was over."""
        if waited_s < EASY_SHARE * goal.longest_wait_s:
            self._since_s = math.inf
            return
        self._since_s = min(self._since_s, now_s)
        if now_s - self._since_s >= INTERVALS * goal.ttft_s:
            self._until_s = now_s + HOLDS_S

    def emptied(self) -> None:
        """Note that nothing waits any more."""
        self._since_s = math.inf

    def lasts(self, goal: Goal, now_s: float) -> bool:
        """Return whether the queue stands, for a request with this goal."""
        return goal.ttft_s < math.inf and (now_s < self._until_s or now_s - self._since_s >= INTERVALS * goal.ttft_s)
