"""One engine between two restarts, as this gateway sees it."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.common.http.target import Target
from engine.contract import headers
from engine.contract.load import LoadReport
from router.fleet.facts import EngineFacts, engine_kind, parent_of
from router.fleet.faults import Faults
from router.fleet.probe import PodIdentity
from router.overload.saturation import Cap
from router.views.adapters import Adapters
from router.views.pod_state import PodState
from router.views.reported import Counts
from router.views.sent import Mark
from router.views.speeds import Speeds
from router.views.types import PodId

MAX_TARGETS = 64
Clock = Callable[[], float]
"""Monotonic seconds."""


class Targets(dict[str, Target]):
    """Path -> target, made on first use. Only the first MAX_TARGETS are kept, because clients may invent paths."""

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

    Each rank has its own load and cache. All ranks share one record of faults: they are one process group and fail
    together.
    """

    __slots__ = (
        "adapters",
        "answered",
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
        "token_s",
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
        """`rank`: the rank that requests are for; None: the engine chooses. `faults`: the record that its pod's ranks
        share; None: a new one. `speeds`: shared by similar pods, which learn from each other's answers; None: it learns
        only from its own."""
        self.url = url
        self.key = key
        """Which of the gateway's keys for engines it gets; empty: the common key."""
        self.targets = Targets(url)
        self.identity = identity
        self.rank = rank
        self.rank_field = b"" if rank is None else f"{headers.DATA_PARALLEL_RANK}: {rank}\r\n".encode()
        """The header field that requests for this rank get; empty without a rank."""
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
        self.token_s = -math.inf
        """When a stream of it last gave a token, as of the last look at that stream."""
        self.answered: set[str] = set()
        """Paths that it has answered well, so it knows them; at most MAX_TARGETS."""
        self.weight = weight
        self.tells_cached_tokens = False
        """Whether an answer ever said how many tokens were reused. If such an engine leaves the number out, it is 0."""

    def __repr__(self) -> str:
        return f"<Pod {self.pod_id} {self.url} epoch={self.epoch} in_flight={self.in_flight}>"

    @property
    def weight(self) -> float:
        """Its share of the traffic relative to others; above 0."""
        return self.state.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.state.weight = weight

    @property
    def model(self) -> str:
        """The first model that it lists; its registry entries are stored under that model."""
        return self.identity.models[0].name

    def report(self, load: LoadReport, *, now_s: float) -> None:
        """Take a load report of the pod."""
        self.cap.reported(load, self.state.lateness_s(now_s))
        self.state.report(load, now_s=now_s)

    def counted(self, counts: Counts, since: Mark, *, now_s: float) -> None:
        """Take the engine's own count of its requests, which was requested at `since`."""
        late_s = self.state.lateness_s(now_s)
        self.cap.reported(counts.as_load(), late_s)
        self.state.counted(counts, since, capacity_tokens=self.facts.kv_capacity_tokens, now_s=now_s)

    def knows(self, path: str) -> None:
        """Note that the pod has answered a request for `path`."""
        if path not in self.answered and len(self.answered) < MAX_TARGETS:
            self.answered.add(path)

    def is_same_life(self, identity: PodIdentity) -> bool:
        """Return whether `identity` is this pod, not restarted."""
        return identity.pod_id == self.identity.pod_id and identity.epoch == self.epoch


def rank_id(pod: PodId, rank: int) -> PodId:
    """Return the id of a data-parallel rank of the pod."""
    return PodId(f"{pod}/{rank}")


def facts_of(identity: PodIdentity) -> EngineFacts:
    """Return what an engine's list of models says about it."""
    adapters = frozenset(model.name for model in identity.models if parent_of(model.card) is not None)
    kind = engine_kind((model.card for model in identity.models), has_epoch=identity.epoch is not None)
    return EngineFacts(engine=kind, adapters=adapters)


class TrackedRequest:
    """A request on a pod. It counts from `with` until the block ends, however that happens."""

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
        """Prompt tokens that the pod computed, as it says at the end of the answer."""
        self.loads_adapter = False
        """Whether the pod has to load the request's adapter; set this before the request is sent."""

    def __enter__(self) -> TrackedRequest:
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
        """Note the answer's first byte. `cached_tokens`: reused prompt tokens; None: the pod does not say."""
        self._pod.state.first_token(self._request_id, now_s=self._clock(), cached_tokens=cached_tokens)
