"""The common parts of the peers: counts of what they sent, and beliefs about what is cached where."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.contract.keys import PrefixKey
from loadgen.simulate.pods.pod import Report
from loadgen.simulate.pods.routing import Offered, Scrape

NOTHING_SCRAPED = Scrape(0, 0, 0.0)


@dataclass(slots=True)
class Sent:
    """A request that a peer sent and that has not ended."""

    pod: str
    prompt_tokens: int
    uncached_tokens: int
    sent_s: float
    has_first_token: bool = False


class Peer:
    """A `Router` with its own counts. Subclasses implement `pick`."""

    name = ""
    scrape_s = 0.0
    takes_reports = False

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"{seed}/{self.name}")
        self.pods: list[str] = []
        self.in_flight: dict[str, int] = {}
        self.sent: dict[int, Sent] = {}
        self.scrapes: dict[str, Scrape] = {}

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """Return one of `pods`, which is never empty."""
        raise NotImplementedError

    def uncached_tokens(self, request: Offered, pod: str, now_s: float) -> int:
        """Return the tokens that the request is believed to prefill on the pod; for peers that count them."""
        return len(request.tokens)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        self.pods = list(pods)
        self.in_flight = {pod: self.in_flight.get(pod, 0) for pod in pods}
        self.scrapes = {pod: scrape for pod, scrape in self.scrapes.items() if pod in self.in_flight}

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """See `Router`."""
        pods = [pod for pod in self.pods if pod not in excluded]
        if not pods:
            return None
        pod = self.pick(request, pods, now_s)
        uncached = self.uncached_tokens(request, pod, now_s)
        self.in_flight[pod] += 1
        self.sent[request.number] = Sent(pod, len(request.tokens), uncached, now_s)
        self.routed(request, pod, now_s)
        return pod

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """After the choice, note what the request puts into the pod's cache."""

    def first_token(self, request: Offered, pod: str, cached_tokens: int, now_s: float) -> None:
        """See `Router`."""
        self.sent[request.number].has_first_token = True

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """See `Router`."""
        del self.sent[request.number]
        if pod in self.in_flight:
            self.in_flight[pod] -= 1

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """See `Router`."""

    def scraped(self, pod: str, scrape: Scrape, now_s: float) -> None:
        """See `Router`."""
        if pod in self.in_flight:
            self.scrapes[pod] = scrape

    def scrape_of(self, pod: str) -> Scrape:
        """Return the last scrape; before the first, that of an idle pod."""
        return self.scrapes.get(pod, NOTHING_SCRAPED)

    def fewest(self, pods: Sequence[str], load: Mapping[str, float]) -> str:
        """Return a random one of the least loaded pods."""
        least = min(load[pod] for pod in pods)
        return self.random.choice([pod for pod in pods if load[pod] == least])

    def best(self, pods: Sequence[str], scores: Mapping[str, float]) -> str:
        """Return a random one of the pods with the highest score."""
        highest = max(scores[pod] for pod in pods)
        return self.random.choice([pod for pod in pods if scores[pod] == highest])


class History:
    """Prefixes that a router sent to pods. Evicts a pod's least recently used keys beyond `limit`, and keys older than
    `max_age_s`."""

    def __init__(self, limit: int, max_age_s: float = float("inf")) -> None:
        self._limit = limit
        self._max_age_s = max_age_s
        self._pods: dict[str, OrderedDict[PrefixKey, float]] = {}

    def add(self, pod: str, keys: Sequence[PrefixKey], now_s: float) -> None:
        """Note that the prefix was sent to the pod."""
        held = self._pods.setdefault(pod, OrderedDict())
        for key in reversed(keys):  # so that a prefix outlives its continuations
            held[key] = now_s
            held.move_to_end(key)
        while len(held) > self._limit or (held and next(iter(held.values())) < now_s - self._max_age_s):
            held.popitem(last=False)

    def match(self, pod: str, keys: Sequence[PrefixKey]) -> int:
        """Return the number of leading keys that were sent to the pod."""
        held = self._pods.get(pod)
        if not held:
            return 0
        return next((i for i, key in enumerate(keys) if key not in held), len(keys))

    def last_use_s(self, pod: str, key: PrefixKey) -> float:
        """Return when the key was last sent to the pod; minus infinity: never."""
        return self._pods.get(pod, OrderedDict()).get(key, float("-inf"))

    def keys_of(self, pod: str) -> int:
        """Return how many keys the pod is believed to hold."""
        return len(self._pods.get(pod, ()))

    def forget(self, pods: Sequence[str]) -> None:
        """Forget all pods except these."""
        self._pods = {pod: held for pod, held in self._pods.items() if pod in pods}


class Events:
    """Prefixes that pods published; the keys stand for the engines' block hashes."""

    def __init__(self) -> None:
        self._pods: dict[str, set[PrefixKey]] = {}

    def apply(self, pod: str, report: Report) -> None:
        """Apply a pod's report."""
        held = self._pods.setdefault(pod, set())
        held.difference_update(report.removed)
        held.update(report.stored)

    def match(self, pod: str, keys: Sequence[PrefixKey]) -> int:
        """Return the number of leading keys that the pod holds."""
        held = self._pods.get(pod)
        if not held:
            return 0
        return next((i for i, key in enumerate(keys) if key not in held), len(keys))

    def forget(self, pods: Sequence[str]) -> None:
        """Forget all pods except these."""
        self._pods = {pod: held for pod, held in self._pods.items() if pod in pods}
