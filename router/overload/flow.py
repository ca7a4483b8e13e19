"""The waiting requests of one tenant and priority: its sessions take turns, each ordered by deadline. Pure.

Between sessions it uses start-time fair queueing, as between tenants (`queue.py` names the sources). A session's tag
grows by the tokens of its requests that are let go (sent to a pod); the least tag goes first. So one session with
hundreds of requests does not hold back a session with one. Each request without a session counts as one session. All of
them share one tag, which grows by tokens / (how many of them wait), so among themselves only the deadline decides.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.overload.standing import NO_GOAL, Goal

SESSIONS = 1024
"""Sessions of a flow that are told apart; numbers that are equal modulo this share a turn (McKenney's stochastic
fairness queueing, INFOCOM 1990). A model's queue holds 1,024 requests by default."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. From `deadline_s` on it is of no use."""

    flow: str
    weight: float
    """Weight of its flow relative to others of the same priority; above 0."""
    priority: int
    """Higher goes first."""
    tokens: int
    """Its cost: the expected tokens of its prompt and its answer; at least 1."""
    size: int
    """Bytes of its body."""
    arrived_s: float
    deadline_s: float
    looked_s: float | None = None
    """When it was first at the head and no pod with room suited it; None: never."""
    number: int = 0
    """Set by the queue: of requests that are otherwise equal, the earlier goes first."""
    session: int = 0
    """The client's name of its session, as a number; 0: none."""
    goal: Goal = NO_GOAL
    """When its first token should come, for a queue that stands."""

    @property
    def key(self) -> tuple[float, int]:
        """Its place within its session."""
        return self.deadline_s, self.number


@dataclass(slots=True, eq=False)
class _Session:
    is_shared: bool
    """Whether it stands for all requests without a session."""
    tag: float
    """Virtual time at which its next request starts."""
    waiting: list[tuple[float, int, Waiting]] = field(default_factory=list)
    """Its requests by deadline. No two numbers are equal, so requests themselves are never compared."""
    tokens: int = 0

    @property
    def head(self) -> _Head:
        """Return its place among the sessions. At least one request must wait."""
        deadline_s, number, _ = self.waiting[0]
        return self.tag, deadline_s, number, self

    @property
    def parts(self) -> int:
        """How many sessions it counts as."""
        return len(self.waiting) if self.is_shared else 1

    def cost(self, place: int) -> float:
        """Return how far its tag moves when the request at `place` is let go, after those before it."""
        tokens = self.waiting[place][2].tokens
        return tokens / (len(self.waiting) - place) if self.is_shared else tokens


_Head = tuple[float, float, int, _Session]


class Flow:
    """One tenant's requests of one priority."""

    __slots__ = ("_heads", "_now", "_sessions", "count", "tag", "tokens", "weight")

    def __init__(self, weight: float, tag: float) -> None:
        """`tag`: see `queue.py`, which moves it."""
        self.weight = weight
        self.tag = tag
        self.tokens = 0
        self.count = 0
        self._now = 0.0
        """Virtual time of the sessions."""
        self._sessions: dict[int, _Session] = {}
        """Sessions that wait, and sessions whose tag is still ahead of the virtual time; empty while nothing waits."""
        self._heads: list[_Head] = []
        """Heads of the sessions that wait, the next one first."""

    def add(self, request: Waiting) -> None:
        """Let a request wait."""
        name = _name(request)
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(not name, self._now)
        elif session.waiting:
            self._drop_head(session)
        else:
            session.tag = max(session.tag, self._now)
        insort(session.waiting, (*request.key, request))
        session.tokens += request.tokens
        self.tokens += request.tokens
        self.count += 1
        insort(self._heads, session.head)

    def remove(self, request: Waiting) -> None:
        """Remove a request that no longer waits."""
        session = self._sessions[_name(request)]
        self._drop_head(session)
        del session.waiting[bisect_left(session.waiting, request.key)]
        session.tokens -= request.tokens
        self.tokens -= request.tokens
        self.count -= 1
        if session.waiting:
            insort(self._heads, session.head)
        if not self.count:
            self._sessions.clear()
            self._now = 0.0

    def pay(self, request: Waiting) -> None:
        """Charge the session of a request that is let go. `remove` is called separately."""
        self._now = max(self._now, self._heads[0][0])
        session = self._sessions[_name(request)]
        self._drop_head(session)
        session.tag += session.cost(bisect_left(session.waiting, request.key))
        insort(self._heads, session.head)
        if len(self._heads) < len(self._sessions):
            for name in [name for name, s in self._sessions.items() if not s.waiting and s.tag <= self._now]:
                del self._sessions[name]

    def first(self) -> Waiting:
        """Return the next request. At least one must wait."""
        return self._heads[0][3].waiting[0][2]

    def last(self) -> Waiting:
        """Return the request to give up first: the last one of the session with the longest backlog. Requests without a
        session count as one session here."""
        heads = self._heads
        worst = heads[0][3] if len(heads) == 1 else max((head[3] for head in heads), key=_backlog)
        return worst.waiting[-1][2]

    def order(self) -> Iterator[Waiting]:
        """Yield all in the order in which they go if no more come. Nothing may change meanwhile."""
        heads, next_head = self._heads, 0
        if len(heads) == 1:
            for _, _, request in heads[0][3].waiting:
                yield request
            return
        following: list[tuple[float, float, int, int, _Session]] = []
        while next_head < len(heads) or following:
            if following and (next_head == len(heads) or following[0][:3] < heads[next_head][:3]):
                tag, _, _, place, session = heapq.heappop(following)
            else:
                tag, _, _, session = heads[next_head]
                place = 0
                next_head += 1
            yield session.waiting[place][2]
            if place + 1 < len(session.waiting):
                deadline_s, number, _ = session.waiting[place + 1]
                heapq.heappush(following, (tag + session.cost(place), deadline_s, number, place + 1, session))

    def expired(self, now_s: float) -> Iterator[Waiting]:
        """Yield the requests whose deadline is over."""
        for head in self._heads:
            for deadline_s, _, request in head[3].waiting:
                if deadline_s > now_s:
                    break
                yield request

    def tokens_before(self, request: Waiting) -> float:
        """Return the tokens of this flow that go before a new `request` if no more come (fluid model)."""
        name = _name(request)
        own = self._sessions.get(name)
        start, ahead = self._now, 0
        if own is not None:
            start = max(own.tag, self._now) if not own.waiting else own.tag
            # Its number will be the highest, so all requests with an equal deadline go before it.
            ahead = sum(other.tokens for deadline_s, _, other in own.waiting if deadline_s <= request.deadline_s)
            start += ahead / max(1, own.parts)
        if len(self._heads) == (own is not None and bool(own.waiting)):
            return ahead
        others = (head[3] for head in self._heads if head[3] is not own)
        return ahead + sum(min(s.tokens, max(0.0, start - s.tag) * s.parts) for s in others)

    def _drop_head(self, session: _Session) -> None:
        head = session.head
        del self._heads[bisect_left(self._heads, head[:3])]


def _name(request: Waiting) -> int:
    """Return a number below SESSIONS; 0 only for a request without a session."""
    return request.session and request.session % SESSIONS + 1


def _backlog(session: _Session) -> tuple[float, int]:
    """Return the backlog per session; the latest request decides between equal ones."""
    return session.tokens / session.parts, session.waiting[-1][1]
