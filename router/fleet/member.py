"""One engine of discovery, and its pods, which get the requests: one, or one for each data-parallel rank."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from router.fleet.discovery import EngineAddress
from router.fleet.faults import Standing
from router.fleet.pod import Pod, facts_of
from router.fleet.probe import PodIdentity
from router.views.speeds import Speeds

Ranks = tuple[int, ...]
"""Data-parallel ranks in order; fewer than two count as one target."""


class Member:
    """One engine of discovery, with what is known of it."""

    __slots__ = (
        "address",
        "admitted",
        "asked",
        "failures",
        "found_ranks",
        "last_error",
        "pods",
        "probed_at_s",
        "speeds",
        "task",
        "wake",
    )

    def __init__(self, address: EngineAddress, speeds: Speeds | None = None) -> None:
        """`speeds`: see `Pod`."""
        self.address = address
        self.speeds = speeds
        self.pods: tuple[Pod, ...] = ()
        """Empty until the engine is identified; one for each data-parallel rank if there are several."""
        self.found_ranks: Ranks = ()
        """The ranks that its metrics show. They are kept across a restart, because the engine most likely has the same
        number again."""
        self.admitted = False
        """Whether the probe says that it answers. Requests also need discovery's consent: `answers`."""
        self.failures = 0
        self.last_error: str | None = None
        self.probed_at_s = 0.0
        """When the last probe ended, with or without an answer."""
        self.asked = False
        """Whether a probe is wanted at once."""
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Probe the engine at once."""
        self.asked = True
        self.wake.set()

    @property
    def pod(self) -> Pod | None:
        """The pod. If there are several ranks, it is the first, which holds the identity and the record of faults of
        all."""
        return self.pods[0] if self.pods else None

    @property
    def url(self) -> str:
        """The engine's base URL."""
        return self.address.url

    @property
    def answers(self) -> bool:
        """Whether both the probe and discovery say that it answers."""
        return self.admitted and self.address.is_ready

    @property
    def takes_requests(self) -> bool:
        """Whether it answers, is not ejected for failing requests, and is not leaving."""
        return self.answers and self.pod is not None and self.pod.faults.standing is Standing.IN

    def wanted_ranks(self) -> Ranks:
        """Return the ranks given by discovery; if it gives none, those that were found."""
        told = self.address.ranks
        return self.found_ranks if told is None else tuple(range(told))

    def begin_life(self, identity: PodIdentity, ranks: Ranks) -> Pod:
        """Make new pods, and return the first. The caller ends the old ones."""
        first = Pod(self.url, identity, self.address.weight, key=self.address.key, speeds=self.speeds)
        self.pods = (first,)
        self.use_ranks(ranks)
        return self.pods[0]

    def end_life(self) -> tuple[Pod, ...]:
        """Remove all pods, and return them."""
        pods, self.pods = self.pods, ()
        return pods

    def use_identity(self, identity: PodIdentity) -> None:
        """Take a changed identity, such as other models, of an engine that has not restarted."""
        adapters = facts_of(identity).adapters
        for pod in self.pods:
            pod.identity = identity
            pod.facts = replace(pod.facts, adapters=adapters)

    def use_ranks(self, ranks: Ranks) -> tuple[Pod, ...] | None:
        """Use a pod for each of `ranks`, or one for all. Return the pods that this ends; None if nothing changes.

        A pod stays if its rank stays.
        """
        wanted: tuple[int | None, ...] = ranks if len(ranks) > 1 else (None,)
        old = {pod.rank: pod for pod in self.pods}
        if not old or tuple(old) == wanted:
            return None
        first = self.pods[0]
        pods = []
        for rank in wanted:
            pod = old.pop(rank, None)
            if pod is None:
                pod = Pod(
                    first.url,
                    first.identity,
                    first.weight,
                    key=first.key,
                    rank=rank,
                    faults=first.faults,
                    speeds=self.speeds,
                )
                pod.facts = replace(
                    pod.facts,
                    engine=first.facts.engine,
                    version=first.facts.version,
                    kv_event_ports=first.facts.kv_event_ports,
                    kv_replay_ports=first.facts.kv_replay_ports,
                )
            ranked = None if rank is None else len(wanted)
            pod.facts = replace(pod.facts, rank=rank, ranks=ranked)
            pods.append(pod)
        self.pods = tuple(pods)
        return tuple(old.values())
