"""One life of one engine, as this gateway sees it."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.contract import headers
from engine.contract.http.target import Target
from engine.contract.load import LoadReport
from router.fleet.facts import EngineFacts, engine_kind, parent_of
from router.fleet.faults import Faults
from router.fleet.probe import PodIdentity
from router.overload.saturation import Cap
from router.routing.adapters import Adapters
from router.routing.pod_state import PodState
from router.routing.reported import Counts
from router.routing.sent import Mark
from router.routing.speeds import Speeds
from router.routing.types import PodId

MAX_TARGETS = 64
Clock = Callable[[], float]
"""Monotonic seconds."""


class Targets(dict[str, Target]):
    """By path: made when the path is first asked for. The first MAX_TARGETS are kept, as clients may make up paths."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def __missing__(self, path: str) -> Target:
        target = Target.of(self._url + path)
        if len(self) < MAX_TARGETS:
            self[path] = target
        return target


class Pod:
    """A pod between two restarts, or one data-parallel rank of it. `in_flight`: this gateway's open requests on it.

    Ranks have loads and caches of their own, and one record of faults: they are one process group, which fails as one.
    """

    __slots__ = (
        "adapters",
        "cap",
        "epoch",
        "facts",
        "faults",
        "heard_at_s",
        "identity",
        "in_flight",
        "key",
        "pod_id",
        "rank",
        "rank_field",
        "state",
        "targets",
        "tells_cached_tokens",
        "url",
    )

    def __init__(
        self,
        url: str,
        identity: PodIdentity,
        weight: float = 1.0,
        *,
        key: str = "",
        rank: int | None = None,
        faults: Faults | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        """`rank`: the one that requests are for; None: the engine places them. `faults`: the record of its pod.
        `speeds`: where pods that are alike learn from each other's answers; None: it learns from its own."""
        self.url = url
        self.key = key
        """Which of the gateway's keys for engines it is shown; empty: the one for all."""
        self.targets = Targets(url)
        self.identity = identity
        self.rank = rank
        self.rank_field = b"" if rank is None else f"{headers.DATA_PARALLEL_RANK}: {rank}\r\n".encode()
        """The header field that requests for it have."""
        self.pod_id: PodId = identity.pod_id if rank is None else rank_id(identity.pod_id, rank)
        self.epoch = identity.epoch
        self.facts = facts_of(identity)
        self.adapters = Adapters()
        self.state = PodState(None if speeds is None else speeds.of(self.model, self.facts.engine))
        if speeds is not None and (factor := speeds.factor_of(self.pod_id)) is not None:
            self.state.speed.begin_with(factor)
        self.faults = Faults() if faults is None else faults
        self.cap = Cap()
        self.in_flight = 0
        self.heard_at_s = -math.inf
        """When it last published to the registry."""
        self.weight = weight
        self.tells_cached_tokens = False
        """Whether an answer ever said how much it reused: an engine that says so leaves out what is 0."""

    def __repr__(self) -> str:
        return f"<Pod {self.pod_id} {self.url} epoch={self.epoch} in_flight={self.in_flight}>"

    @property
    def weight(self) -> float:
        """Traffic it is meant to take beside others; above 0."""
        return self.state.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.state.weight = weight

    @property
    def model(self) -> str:
        """The first model it lists: the one its registry entries are filed under."""
        return self.identity.models[0].name

    def report(self, load: LoadReport, *, now_s: float) -> None:
        """A load report of it."""
        self.cap.reported(load, self.state.lateness_s(now_s))
        self.state.report(load, now_s=now_s)

    def counted(self, counts: Counts, since: Mark, *, now_s: float) -> None:
        """The engine's own count of its requests came, which was asked for at `since`."""
        late_s = self.state.lateness_s(now_s)
        self.cap.reported(counts.as_load(), late_s)
        self.state.counted(counts, since, capacity_tokens=self.facts.kv_capacity_tokens, now_s=now_s)

    def is_same_life(self, identity: PodIdentity) -> bool:
        """Whether `identity` is this pod, not restarted."""
        return identity.pod_id == self.identity.pod_id and identity.epoch == self.epoch


def rank_id(pod: PodId, rank: int) -> PodId:
    """What a data-parallel rank of the pod is called."""
    return PodId(f"{pod}/{rank}")


def facts_of(identity: PodIdentity) -> EngineFacts:
    """What the list of its models tells of an engine."""
    adapters = frozenset(model.name for model in identity.models if parent_of(model.card) is not None)
    kind = engine_kind((model.card for model in identity.models), has_epoch=identity.epoch is not None)
    return EngineFacts(engine=kind, adapters=adapters)


class Lease:
    """A request on a pod. It counts from `with` to the end of the block, however that ends."""

    __slots__ = (
        "_clock",
        "_is_trial",
        "_output_tokens",
        "_pod",
        "_prompt_tokens",
        "_request_id",
        "_streams",
        "_uncached_tokens",
        "computed_tokens",
        "loads_adapter",
    )

    def __init__(
        self,
        pod: Pod,
        request_id: str,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
        streams: bool,
        clock: Clock,
        is_trial: bool = False,
    ) -> None:
        self._pod = pod
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._uncached_tokens = uncached_tokens
        self._output_tokens = output_tokens
        self._streams = streams
        self._clock = clock
        self._is_trial = is_trial
        self.computed_tokens: int | None = None
        """Prompt tokens that the pod computed, by what it says at the end of the answer."""
        self.loads_adapter = False
        """Whether the pod has to load the request's adapter: to be set before it is sent."""

    def __enter__(self) -> Lease:
        self._pod.in_flight += 1
        self._pod.state.sent(
            self._request_id,
            prompt_tokens=self._prompt_tokens,
            uncached_tokens=self._uncached_tokens,
            output_tokens=self._output_tokens,
            now_s=self._clock(),
            streams=self._streams,
            loads_adapter=self.loads_adapter,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._pod.in_flight -= 1
        if self._is_trial:
            self._pod.faults.end_trial()
        self._pod.state.finished(self._request_id, now_s=self._clock(), uncached_tokens=self.computed_tokens)

    def first_token(self, cached_tokens: int | None) -> None:
        """The answer's first byte came. `cached_tokens`: reused prompt tokens, None where the pod does not say."""
        self._pod.state.first_token(self._request_id, now_s=self._clock(), cached_tokens=cached_tokens)
