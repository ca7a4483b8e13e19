"""Waiting requests in the order in which they are let go (sent to a pod): by priority, then weighted fair between
flows, then by deadline. Pure: every time is seconds of one monotonic clock, passed in.

Between the flows of one priority it uses start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2). A
flow's tag is the virtual time at which its next request starts. The least tag goes first, and grows by tokens / weight.
So a flow that asks for less than its share goes first whenever it asks, and no flow is behind another by more than a
request. Within a flow its sessions take turns (`flow.py`).
If the queue is full, the flow with the longest backlog for its weight gives up its last request (McKenney's stochastic
fairness queueing, INFOCOM 1990), so that no flow fills the queue for the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from router.overload.flow import Flow, Waiting

LOWER_SHARE = 0.1
"""Share of the tokens that the lower priorities get while several priorities wait. Without it they would starve for as
long as the highest fills the pods."""


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}
        """Flows that wait, and flows whose tag is still ahead of the virtual time."""
        self.now = 0.0
        """The virtual time."""
        self.count = 0

    def add(self, request: Waiting) -> None:
        flow = self.flows.get(request.flow)
        if flow is None:
            flow = self.flows[request.flow] = Flow(request.weight, self.now)
        elif not flow.count:
            flow.tag = max(flow.tag, self.now)
        flow.weight = request.weight
        flow.add(request)
        self.count += 1

    def remove(self, request: Waiting) -> None:
        self.flows[request.flow].remove(request)
        self.count -= 1

    def pay(self, request: Waiting) -> None:
        """Charge the flow of a request that is let go. `remove` is called separately."""
        # If a request further back is let go, the flows ahead of it keep their place.
        self.now = max(self.now, min(f.tag for f in self.flows.values() if f.count))
        self.flows[request.flow].tag += request.tokens / request.weight
        self.flows[request.flow].pay(request)
        for name in [name for name, f in self.flows.items() if not f.count and f.tag <= self.now]:
            del self.flows[name]

    def order(self) -> Iterator[Waiting]:
        """Yield all in the order in which they go if no more come. Nothing may change meanwhile."""
        heads = []
        for flow in self.flows.values():
            if flow.count:
                requests = flow.order()
                first = next(requests)
                heads.append((flow.tag, first.number, first, requests))
        heapq.heapify(heads)
        while heads:
            tag, _, request, requests = heapq.heappop(heads)
            yield request
            following = next(requests, None)
            if following is not None:
                heapq.heappush(heads, (tag + request.tokens / request.weight, following.number, following, requests))

    def last(self) -> Waiting:
        """Return the request to give up first: the last one of the flow with the longest backlog for its weight."""
        flows = [flow for flow in self.flows.values() if flow.count]
        return max((flow.tokens / flow.weight, last.number, last) for flow in flows for last in (flow.last(),))[2]

    def tokens_before(self, request: Waiting) -> float:
        """Return the tokens of this level that go before a new `request` if no more come (fluid model)."""
        own = self.flows.get(request.flow)
        start = self.now if own is None else max(own.tag, self.now) if not own.count else own.tag
        ahead = 0.0 if own is None else own.tokens_before(request)
        start += ahead / request.weight
        others = (flow for flow in self.flows.values() if flow is not own and flow.count)
        return ahead + sum(min(flow.tokens, max(0.0, start - flow.tag) * flow.weight) for flow in others)


class FairQueue:
    """The waiting requests of one model, bounded in number and bytes."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._levels: dict[int, _Level] = {}
        """Priority -> level, for the levels in which requests wait."""
        self._numbers = itertools.count()
        self._owed_tokens = 0.0
        """Tokens owed to the priorities below the highest that waits."""
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes of all bodies."""
        return self._bytes

    def push(self, request: Waiting) -> list[Waiting]:
        """Queue a request. Return the requests that are given up for it, lowest priority first; only `request` itself
        if there is no place for it."""
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
        """Remove a request that no longer waits and is not let go."""
        self._take(request)
        self._forget_empty()

    def serve(self, request: Waiting) -> None:
        """Remove a request that is let go, and charge its flow."""
        highest = max(self._levels)
        if request.priority < highest:
            self._owed_tokens = max(0.0, self._owed_tokens - request.tokens)
        elif len(self._levels) > 1:
            self._owed_tokens += LOWER_SHARE / (1 - LOWER_SHARE) * request.tokens
        self._levels[request.priority].pay(request)
        self.remove(request)

    def order(self) -> Iterator[Waiting]:
        """Yield all in the order in which they go if no more come. Nothing may change meanwhile.

        If lower priorities are owed enough, a request of one of them comes first: the one that has waited longest.
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
        """Return the next request, in fair order, of the chosen flows within the highest priority that waits; None:
        there is none."""
        if not self._levels:
            return None
        flows = self._levels[max(self._levels)].flows
        meant = [flow for name, flow in flows.items() if flow.count and is_meant(name)]
        if not meant:
            return None
        return min(meant, key=lambda flow: (flow.tag, flow.first().number)).first()

    def expired(self, now_s: float) -> list[Waiting]:
        """Remove and return the requests whose deadline has passed."""
        flows = [flow for level in self._levels.values() for flow in level.flows.values()]
        gone = [request for flow in flows for request in flow.expired(now_s)]
        for request in gone:
            self._take(request)
        self._forget_empty()
        return gone

    def tokens_before(self, request: Waiting) -> float:
        """Return the tokens that go before a new `request` if no more come."""
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
