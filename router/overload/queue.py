"""Requests that wait, in the order in which they are let go: by priority, then weighted fair between flows, then by
deadline. Pure: every time is seconds of one monotonic clock, passed in.

Between the flows of one priority: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2). A flow's
tag is the virtual time at which its next request starts; the least goes first, and grows by tokens / weight. So a
flow that asks for less than its share goes first whenever it asks, and none is behind another by more than a request.
Of a full queue the flow with the longest backlog for its weight gives up its last (McKenney's stochastic fairness
queueing, INFOCOM 1990), so that no flow fills it for the others.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

LOWER_SHARE = 0.1
"""Of the tokens that are let go while requests of several priorities wait, for those that are not of the highest one:
else they would starve for as long as the highest fill the pods."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. `deadline_s`: it is no use any more from then on."""

    flow: str
    weight: float
    """Of the flow, beside others of the same priority; above 0."""
    priority: int
    """Higher goes first."""
    tokens: int
    """What it costs: of its prompt and of its answer, as expected; at least 1."""
    size: int
    """Bytes of its body."""
    arrived_s: float
    deadline_s: float
    looked_s: float | None = None
    """When it was first at the head and no pod with room suited it."""
    number: int = 0
    """Set by the queue: of those that are otherwise equal, the earlier goes first."""

    @property
    def key(self) -> tuple[float, int]:
        """Its place within its flow."""
        return self.deadline_s, self.number


@dataclass(slots=True)
class _Flow:
    weight: float
    tag: float
    """Virtual time at which its next request starts."""
    waiting: list[tuple[float, int, Waiting]] = field(default_factory=list)
    """By deadline. No two numbers are equal, so requests themselves are never compared."""
    tokens: int = 0

    def add(self, request: Waiting) -> None:
        insort(self.waiting, (*request.key, request))
        self.tokens += request.tokens

    def remove(self, request: Waiting) -> None:
        place = bisect_left(self.waiting, request.key)
        del self.waiting[place]
        self.tokens -= request.tokens


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}
        """Those that wait, and those whose tag is ahead of the virtual time still."""
        self.now = 0.0
        """The virtual time."""
        self.count = 0

    def add(self, request: Waiting) -> None:
        flow = self.flows.get(request.flow)
        if flow is None:
            flow = self.flows[request.flow] = _Flow(request.weight, self.now)
        elif not flow.waiting:
            flow.tag = max(flow.tag, self.now)
        flow.weight = request.weight
        flow.add(request)
        self.count += 1

    def remove(self, request: Waiting) -> None:
        self.flows[request.flow].remove(request)
        self.count -= 1

    def pay(self, request: Waiting) -> None:
        """It is let go: its flow pays. It is removed by its own call."""
        # Where one further back is let go, the flows ahead of it keep their place.
        self.now = max(self.now, min(f.tag for f in self.flows.values() if f.waiting))
        self.flows[request.flow].tag += request.tokens / request.weight
        for name in [name for name, f in self.flows.items() if not f.waiting and f.tag <= self.now]:
            del self.flows[name]

    def order(self) -> Iterator[Waiting]:
        """All, as they would be let go were none to come. Nothing may change meanwhile."""
        heads = [(flow.tag, flow.waiting[0][1], 0, flow) for flow in self.flows.values() if flow.waiting]
        heapq.heapify(heads)
        while heads:
            tag, _, place, flow = heapq.heappop(heads)
            request = flow.waiting[place][2]
            yield request
            if place + 1 < len(flow.waiting):
                following = flow.waiting[place + 1]
                heapq.heappush(heads, (tag + request.tokens / flow.weight, following[1], place + 1, flow))

    def last(self) -> Waiting:
        """The one to give up first: the last of the flow with the longest backlog for its weight."""
        flow = max((f for f in self.flows.values() if f.waiting), key=lambda f: (f.tokens / f.weight, f.waiting[-1][1]))
        return flow.waiting[-1][2]

    def tokens_before(self, request: Waiting) -> float:
        """Tokens of this level that are let go before `request`, which is not in it, were none to come (fluid)."""
        own = self.flows.get(request.flow)
        start = self.now if own is None else max(own.tag, self.now) if not own.waiting else own.tag
        ahead = 0
        if own is not None:
            # Its number will be the highest: of equal deadlines all are before it.
            ahead = sum(other.tokens for deadline_s, _, other in own.waiting if deadline_s <= request.deadline_s)
        start += ahead / request.weight
        others = (flow for flow in self.flows.values() if flow is not own and flow.waiting)
        return ahead + sum(min(flow.tokens, max(0.0, start - flow.tag) * flow.weight) for flow in others)


class FairQueue:
    """The waiting requests of one model, bounded in number and bytes."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._levels: dict[int, _Level] = {}
        """Those in which requests wait, by priority."""
        self._numbers = itertools.count()
        self._owed_tokens = 0.0
        """To the priorities below the highest that waits."""
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes of all bodies."""
        return self._bytes

    def push(self, request: Waiting) -> list[Waiting]:
        """Queue it. Returns those that had to go for it, lowest priority first; `request` alone, where it may not."""
        request.number = next(self._numbers)
        self._add(request)
        dropped: list[Waiting] = []
        while self._count > self._max_requests or self._bytes > self._max_bytes:
            last = self._levels[min(priority for priority, level in self._levels.items() if level.count)].last()
            self._take(last)
            dropped.append(last)
            if last is request:
                for other in dropped[:-1]:
                    self._add(other)
                dropped = [request]
                break
        self._forget_empty()
        return dropped

    def remove(self, request: Waiting) -> None:
        """It waits no more, and is not let go either."""
        self._take(request)
        self._forget_empty()

    def serve(self, request: Waiting) -> None:
        """It is let go."""
        highest = max(self._levels)
        if request.priority < highest:
            self._owed_tokens = max(0.0, self._owed_tokens - request.tokens)
        elif len(self._levels) > 1:
            self._owed_tokens += LOWER_SHARE / (1 - LOWER_SHARE) * request.tokens
        self._levels[request.priority].pay(request)
        self.remove(request)

    def order(self) -> Iterator[Waiting]:
        """All, as they would be let go were none to come: the first first. Nothing may change meanwhile.

        Where lower priorities are owed enough, one of them comes first: the one whose next request waits longest.
        """
        levels = [self._levels[priority] for priority in sorted(self._levels, reverse=True)]
        owed: Waiting | None = None
        if len(levels) > 1:
            owed = min((next(level.order()) for level in levels[1:]), key=lambda head: head.arrived_s)
            if owed.tokens <= self._owed_tokens:
                yield owed
            else:
                owed = None
        for level in levels:
            for request in level.order():
                if request is not owed:
                    yield request

    def first_of(self, is_meant: Callable[[str], bool]) -> Waiting | None:
        """Of the highest priority that waits, the next request of the flows meant, in their fair order; None: there is
        none."""
        if not self._levels:
            return None
        flows = self._levels[max(self._levels)].flows
        meant = [flow for name, flow in flows.items() if flow.waiting and is_meant(name)]
        if not meant:
            return None
        return min(meant, key=lambda flow: (flow.tag, flow.waiting[0][1])).waiting[0][2]

    def expired(self, now_s: float) -> list[Waiting]:
        """Those whose deadline is over, which are removed."""
        gone = []
        for level in self._levels.values():
            for flow in level.flows.values():
                for deadline_s, _, request in flow.waiting:
                    if deadline_s > now_s:
                        break
                    gone.append(request)
        for request in gone:
            self._take(request)
        self._forget_empty()
        return gone

    def tokens_before(self, request: Waiting) -> float:
        """Tokens that are let go before `request`, which is not queued yet, were none to come."""
        higher = sum(
            flow.tokens
            for priority, level in self._levels.items()
            if priority > request.priority
            for flow in level.flows.values()
        )
        level = self._levels.get(request.priority)
        return higher + (0.0 if level is None else level.tokens_before(request))

    def _add(self, request: Waiting) -> None:
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level()
        level.add(request)
        self._count += 1
        self._bytes += request.size

    def _take(self, request: Waiting) -> None:
        self._levels[request.priority].remove(request)
        self._count -= 1
        self._bytes -= request.size

    def _forget_empty(self) -> None:
        for priority in [priority for priority, level in self._levels.items() if not level.count]:
            del self._levels[priority]
        if len(self._levels) < 2:
            self._owed_tokens = 0.0
