"""Choose a pod: match the keys, view the pods, ask the policy, remember the choice, learn from the answer."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.contract.events import Keys
from router.choosing.pod_tables import Tables
from router.choosing.registry_view import RegistryView
from router.choosing.score_observer import ScoreObserver
from router.choosing.shadow import Shadows
from router.edge.errors import RETRY_AFTER_S, NoEngine
from router.engines.usage import Usage
from router.fleet.pod import Clock, Pod
from router.peer_sync.messages import Routed
from router.peer_sync.sent_reports import SentReport, SentReports
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.cache_estimate import Taken
from router.registry.index import PrefixIndex
from router.registry.speculative_entries import Run
from router.routing.affinity_groups import AffinityGroups
from router.routing.fetching import add_shared
from router.routing.predicted_ttft import PredictedTtft
from router.routing.prefill_shares import ModelShares
from router.routing.shares import TrafficShares
from router.settings.constants import Constants
from router.telemetry.metrics import Metrics
from router.views.latency import prefill_s
from router.views.pod_partition import Gateways
from router.views.table import CandidatePods, Policy
from router.views.types import Decision, PodId, PodScore, RequestInfo

log = logging.getLogger(__name__)

FALLBACK_POLICY = "bounded_hash"
INDEX_POLICIES = frozenset(("cache_aware", "predicted_ttft"))
"""Policies that decide by the index, which tells them nothing once the registry has expired."""
EXPIRY_CHECK_S = 0.25
TOKENS_PER_BYTE_RANGE = (0.02, 2.0)
"""Ratios outside this range come from prompts that are not text (images), and teach nothing about text."""
MOST_WITH_ADAPTERS = 256
"""With more pods, a decision ignores which of them have the adapter loaded, since it would have to ask each pod."""


@dataclass(slots=True)
class Choice:
    """The pod chosen for a request, and why. `strides`: leading prefix keys that the pod was believed to hold.
    `loads_adapter`: the pod has to load the request's adapter, and has room for it."""

    pod: Pod
    policy: str
    decision: Decision
    strides: int
    loads_adapter: bool = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens expected to be reused."""
        return self.decision.predicted_cached_tokens


class ServingPods(Protocol):
    """The pods to choose among: `router.fleet.fleet.Fleet`, or a simulated fleet."""

    def pods(self, model: str) -> Sequence[Pod]:
        """Return the pods that take requests for the model, in stable order."""
        ...


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What decisions rest on: the pods, what their caches hold, which of them report, and each model's ratios."""

    fleet: ServingPods
    index: PrefixIndex
    registry: RegistryView
    estimates: Estimates


class Chooser:
    """Decides which pod a request goes to. It never awaits, so what it reads and what it records are consistent."""

    def __init__(
        self,
        knowledge: Knowledge,
        make_policies: Callable[[], Mapping[str, Policy]],
        metrics: Metrics,
        constants: Constants,
        *,
        clock: Clock,
        shadows: Shadows | None = None,
        sent_reports: SentReports | None = None,
        name: str = "",
    ) -> None:
        """`make_policies`: returns new policies by name. Each model has its own: models share neither pods nor keys.
        `sent_reports`: tells other gateways what an answer refutes. `name`: this gateway's name in the `shares` that
        gateways exchange; random if not given.
        """
        self.name = name or uuid.uuid4().hex
        self.observer: ScoreObserver | None = None
        self._clock = clock
        self._fleet = knowledge.fleet
        self._index = knowledge.index
        self._registry = knowledge.registry
        self._estimates = knowledge.estimates
        self._constants = constants
        self._make_policies = make_policies
        self._policies: dict[str, Mapping[str, Policy]] = {}
        self._shares: dict[str, ModelShares] = {}
        self._metrics = metrics
        self._shadows = shadows
        self._tables = Tables(knowledge.index.free_tokens)
        self._sent_reports = sent_reports
        outbox = None if sent_reports is None else sent_reports.outbox
        self._gateways = Gateways("" if outbox is None else f"{outbox.life:x}")
        self._is_expired = False
        self._check_at_s = -math.inf

    def choose(self, inbound: Inbound, excluded: Collection[PodId] = ()) -> Choice:
        """Return the pod for the request. From now on the pod counts as holding the keys. Raises Unavailable."""
        scores = () if self.observer is None or excluded else self._scores(inbound, self.observer)
        started_s = time.perf_counter()
        now_s = self._clock()
        choice, _, seen = self._decide(inbound, excluded, now_s)
        choice.decision.scores = scores
        if choice.policy != inbound.policy:
            self._metrics.decisions.fell_back()
        pod = choice.pod
        taken = None
        work_s = prefill_s(pod.state.cost, max(0, inbound.prompt_tokens - choice.cached_tokens), inbound.prompt_tokens)
        reports = self._registry.reports(pod.pod_id)
        if reports:
            self._shares[inbound.model].prefill.sent(work_s)
        else:
            tokens = inbound.prompt_tokens + inbound.output_tokens
            taken = Taken(tokens, inbound.tokens_per_stride, pod.facts.kv_capacity_tokens, pod.facts.block_tokens)
            self._gateways.sent(work_s, now_s)
        self._index.speculate(pod.pod_id, inbound.keys, now_s, self._ttl_s(pod.pod_id, reports=reports), taken)
        if inbound.model in pod.facts.adapters:
            choice.loads_adapter = pod.adapters.loads(inbound.model)
            pod.adapters.used(inbound.model)
        self._metrics.decisions.decided(time.perf_counter() - started_s)
        if self._shadows is not None and not excluded:  # a retry is not a new request
            self._shadows.compare(inbound.model, choice.decision, self._info(inbound, now_s), seen, self._in_force)
        return choice

    def _scores(self, inbound: Inbound, observer: ScoreObserver) -> tuple[PodScore, ...]:
        """Return every pod's score if the observer wants them."""
        if not observer.wants_scores():
            return ()
        started_s = time.perf_counter()
        scores = self._decide(inbound, (), self._clock(), explain=True)[0].decision.scores
        observer.scored(time.perf_counter() - started_s)
        return scores

    def explain(self, inbound: Inbound) -> tuple[Choice, list[tuple[Pod, dict[str, object]]]]:
        """Return what `choose` would do, with every pod's score, and what is known of each pod, by name. The call has
        no side effects. Raises Unavailable."""
        now_s = self._clock()
        choice, pods, seen = self._decide(inbound, (), now_s, explain=True)
        return choice, [(pod, seen.of(row, now_s)) for row, pod in enumerate(pods)]

    def least_ttft_s(self, inbound: Inbound) -> float:
        """Return the lowest predicted time to the first token over all pods, in seconds, without side effects.

        Raises Unavailable.
        """
        now_s = self._clock()
        predictor = self._policies_of(inbound.model)["predicted_ttft"]
        assert isinstance(predictor, PredictedTtft)
        seen = self._candidates(inbound, self._pods(inbound, ()), (), now_s)
        return float(predictor.ttfts_s(self._info(inbound, now_s), seen).min())

    def patience_s(self, inbound: Inbound, without_room: Collection[PodId]) -> float:
        """Return the seconds that the request should wait for one of the pods `without_room` before it goes elsewhere.

        That is the time that another pod would need to compute what only those pods hold; 0 if they hold no more than
        others. A request that waits no longer than this loses at most as much as it could have saved (ski rental). The
        call has no side effects.
        """
        now_s = self._clock()
        table = self._tables.of(inbound.model, self._fleet.pods(inbound.model))
        serving = table.id_set
        sets, _ = self._index.match_sets(inbound.keys, now_s)
        there = elsewhere = 0
        for holders, strides in reversed(sets):  # most strides first; each set is part of the next here
            if not there and any(pod in without_room and pod in serving for pod in holders):
                there = strides
            if not elsewhere and any(pod not in without_room and pod in serving for pod in holders):
                elsewhere = strides
            if elsewhere:
                break
        if there <= elsewhere:
            return 0.0
        return (there - elsewhere) * inbound.tokens_per_stride * table.at(now_s).least_token_s(without_room)

    def _decide(
        self, inbound: Inbound, excluded: Collection[PodId], now_s: float, *, explain: bool = False
    ) -> tuple[Choice, Sequence[Pod], CandidatePods]:
        pods = self._pods(inbound, excluded)
        policy = self._policy(inbound, now_s)
        seen = self._candidates(inbound, pods, excluded, now_s)
        decision = policy.choose(self._info(inbound, now_s), seen, explain=explain)
        pod = pods[decision.pod]
        return Choice(pod, policy.name, decision, self._index.strides_of(pod.pod_id, inbound.keys, now_s)), pods, seen

    def _candidates(
        self, inbound: Inbound, pods: Sequence[Pod], excluded: Collection[PodId], now_s: float
    ) -> CandidatePods:
        """Return the state of the pods, with what they hold of the request. `pods`: without those `excluded`."""
        if excluded:
            table = self._tables.without(inbound.model, self._fleet.pods(inbound.model), excluded)
        else:
            table = self._tables.of(inbound.model, pods)
        seen, per_stride, prompt_tokens = table.at(now_s), inbound.tokens_per_stride, inbound.prompt_tokens
        sets, tiers = self._index.match_sets(inbound.keys, now_s)
        for pod_ids, strides in sets:
            seen.hold(table.rows(pod_ids), min(int(strides * per_stride), prompt_tokens))
        for pod_id, match in tiers.items():
            if (row := table.row(pod_id)) is not None:
                host_tokens = min(int(match.host_strides * per_stride), prompt_tokens)
                disk_tokens = min(int(match.disk_strides * per_stride), prompt_tokens)
                seen.fetch(row, host_tokens, disk_tokens)
        add_shared(seen)
        if self._index.regret:
            seen.free_tokens = table.free_tokens if self._shadows is None else table.free_tokens.copy()
        if inbound.model in pods[0].facts.adapters and len(pods) <= MOST_WITH_ADAPTERS:
            seen.adapter_s = np.array([_adapter_s(pod, inbound.model) for pod in pods])
        return seen

    def undo(self, inbound: Inbound, choice: Choice) -> Keys:
        """Take back a choice whose request did not run. Return the keys that the pod no longer counts as holding."""
        return tuple(self._index.retract(choice.pod.pod_id, inbound.keys))

    def report_of(self, inbound: Inbound, choice: Choice, request_id: str) -> SentReport | None:
        """Return the object that reports the request to other gateways; None if they need no report."""
        if self._sent_reports is None:
            return None
        return self._sent_reports.of(
            Routed(
                0.0,
                self._sent_reports.next_number(),
                choice.pod.pod_id,
                inbound.keys,
                inbound.prompt_tokens,
                max(0, inbound.prompt_tokens - choice.cached_tokens),
                inbound.output_tokens,
                request_id,
            )
        )

    def learn(self, inbound: Inbound, choice: Choice, usage: Usage) -> None:
        """Learn from an answer's token counts: the model's ratios, and whether the pod held what the index said.

        Sets `usage.cached_tokens` to 0 if the engine left it out because there were none.
        """
        estimate = self._estimates.of(inbound.model)
        if usage.completion_tokens and not usage.is_broken:
            estimate.saw_output(usage.completion_tokens / inbound.answers)
        if usage.prompt_tokens and inbound.teaches_tokens and inbound.prompt_bytes:
            low, high = TOKENS_PER_BYTE_RANGE
            if low < usage.prompt_tokens / inbound.prompt_bytes < high:
                estimate.saw_prompt(inbound.prompt_bytes, usage.prompt_tokens)
        if usage.cached_tokens is not None:
            choice.pod.tells_cached_tokens = True
        elif usage.is_final and usage.prompt_tokens and choice.pod.tells_cached_tokens:
            usage.cached_tokens = 0  # vLLM and SGLang leave the count out if it is 0
        if usage.cached_tokens is not None:
            if inbound.prompts == 1:  # otherwise the counts include prompts whose keys are not known
                self._correct(inbound, choice, usage.cached_tokens, usage.prompt_tokens or inbound.prompt_tokens)
            self._metrics.decisions.cached(
                choice.policy,
                prompt_tokens=usage.prompt_tokens or inbound.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                predicted_tokens=choice.cached_tokens,
            )

    def _correct(self, inbound: Inbound, choice: Choice, cached_tokens: int, prompt_tokens: int) -> None:
        """Correct the index by the answer's cached tokens, whether the pod held less or more than predicted.

        The slack allows for cached tokens that come in blocks, and for bytes that do not map evenly to tokens.
        """
        held = math.ceil(cached_tokens / prompt_tokens * inbound.prompt_bytes / self._constants.stride_bytes)
        slack = 2 + choice.strides // 8
        if abs(held - choice.strides) <= slack:
            return
        if choice.pod not in self._fleet.pods(inbound.model):  # the pod has left, and its keys are dropped
            return
        if held > choice.strides:
            tokens = cached_tokens - choice.strides * inbound.tokens_per_stride
            self._index.was_held(choice.pod.pod_id, inbound.keys, choice.strides, tokens)
            return
        self.refute(choice.pod.pod_id, inbound.keys, held, self._clock())
        if self._sent_reports is not None:
            self._sent_reports.refuted(choice.pod.pod_id, inbound.keys, held, cached_tokens)

    # -- what pods are believed to hold, from this gateway's requests and from other gateways ------------------

    def remember(self, pod: PodId, keys: Keys, now_s: float, taken: Taken | None = None) -> None:
        """Count the pod as holding `keys`, since a request with them went there.

        `taken`: the room that the request takes in the cache of a pod that publishes nothing, if not counted before.
        """
        self._index.speculate(pod, keys, now_s, self._ttl_s(pod, reports=self._registry.reports(pod)), taken)

    def heard(
        self, pod: Pod, request: str, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, at_s: float
    ) -> None:
        """Count another gateway's request. `request`: the gateway's random number, a dot, the request's number."""
        now_s = self._clock()
        predictor = self._policies_of(pod.model).get("predicted_ttft")
        if isinstance(predictor, PredictedTtft):
            predictor.sent_elsewhere(pod.pod_id, max(1, uncached_tokens) + output_tokens, now_s)
        work_s = prefill_s(pod.state.cost, uncached_tokens, prompt_tokens)
        self._gateways.heard(request.rpartition(".")[0], work_s, now_s - at_s, now_s)

    def gateway_gone(self, gateway: str) -> None:
        """Note that another gateway has stopped. `gateway`: its random number, as in `heard`."""
        self._gateways.gone(gateway)

    def taken(self, pod: Pod, routed: Routed) -> Taken:
        """Return the cache room that another gateway's request takes on the pod, from what that gateway reports.

        A prompt of k keys is between k and k + 1 strides long. That bounds the tokens of a key, whatever this gateway
        has learnt of the model. A gateway that has just started has learnt nothing, and reads the requests of the last
        minute. If it counted 64 tokens for a key of 107, the other 43 would count anew for every request with the same
        key. Half of what the pod holds would then be dropped for lack of room.
        """
        facts, strides = pod.facts, len(routed.keys)
        key_tokens = self._estimates.of(pod.model).tokens_per_byte * self._constants.stride_bytes
        key_tokens = max(key_tokens, routed.prompt_tokens / (strides + 1))
        if strides:
            key_tokens = min(key_tokens, routed.prompt_tokens / strides)
        tokens = routed.prompt_tokens + routed.output_tokens
        return Taken(tokens, max(1.0, key_tokens), facts.kv_capacity_tokens, facts.block_tokens)

    def forget_unused(self, pod: PodId, keys: Keys, used_at_s: float) -> None:
        """Drop those of `keys` from the pod that were last used at `used_at_s` or before."""
        self._index.forget_unused(pod, keys, used_at_s)

    def refute(self, pod: PodId, keys: Keys, held_strides: int, now_s: float) -> None:
        """Record that the pod had held only `held_strides` of `keys`. It holds all now, since it has computed them."""
        self._index.refute(pod, keys, held_strides, now_s)
        self.remember(pod, keys, now_s)

    def tell_forgotten(self, pod: PodId, *, is_sure: bool) -> None:
        """Tell the other gateways that this one has dropped all keys of the pod. `is_sure`: see SentReports."""
        if self._sent_reports is not None:
            self._sent_reports.forgotten(pod, is_sure=is_sure)

    def forget(self, pod: PodId, at_s: float) -> None:
        """Drop the keys that the pod has not reported, except those of requests after `at_s`."""
        self._index.forget_until(pod, at_s)

    def assume(self, pod: PodId, runs: Sequence[Run], now_s: float) -> None:
        """Take over what another gateway believes that the pod holds."""
        self._index.assume(pod, runs, now_s, self._ttl_s(pod, reports=self._registry.reports(pod)))

    def assumed(self, pod: PodId) -> Sequence[Run]:
        """Return what this gateway believes that the pod holds, for other gateways."""
        return self._index.assumed(pod)

    def _ttl_s(self, pod: PodId, *, reports: bool) -> float:
        if reports:
            return self._constants.speculation_ttl_s
        return math.inf if self._index.capacity_is_told(pod) else self._constants.foreign_ttl_s

    def _pods(self, inbound: Inbound, excluded: Collection[PodId]) -> Sequence[Pod]:
        pods: Sequence[Pod] = self._fleet.pods(inbound.model)
        if excluded:
            pods = [pod for pod in pods if pod.pod_id not in excluded]
        if not pods:
            if not excluded:
                self._tables.drop(inbound.model)
            raise NoEngine(inbound.model, retry_after_s=RETRY_AFTER_S)
        return pods

    def shares(self) -> Mapping[str, ModelShares]:
        """Return the shares that gateways exchange, by model."""
        return dict(self._shares)

    def traffic_shares(self) -> dict[str, TrafficShares]:
        """Return the counters behind the policy `affinity_groups`, by model."""
        groups = {model: policies.get("affinity_groups") for model, policies in self._policies.items()}
        return {model: policy.shares for model, policy in groups.items() if isinstance(policy, AffinityGroups)}

    def _policy(self, inbound: Inbound, now_s: float) -> Policy:
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + EXPIRY_CHECK_S
            expired = self._registry.expired
            if expired != self._is_expired:
                log.warning("registry: %s", "expired, routing by bounded_hash" if expired else "back in use")
            self._is_expired = expired
        return self._policies_of(inbound.model)[self._in_force(inbound.policy)]

    def _policies_of(self, model: str) -> Mapping[str, Policy]:
        policies = self._policies.get(model)
        if policies is None:
            policies = self._policies[model] = self._make_policies()
            groups = policies.get("affinity_groups")
            traffic = groups.shares if isinstance(groups, AffinityGroups) else None
            self._shares[model] = ModelShares(self.name, traffic)
        return policies

    def _in_force(self, policy: str) -> str:
        return FALLBACK_POLICY if self._is_expired and policy in INDEX_POLICIES else policy

    def _info(self, inbound: Inbound, now_s: float) -> RequestInfo:
        partition = self._gateways.partition(now_s)
        if partition is None and (shares := self._shares.get(inbound.model)) is not None:
            partition = shares.prefill.partition(now_s)
        return RequestInfo(
            inbound.keys,
            inbound.prompt_tokens,
            now_s,
            inbound.output_tokens,
            partition,
            self._index.regret,
            inbound.session,
        )


def _adapter_s(pod: Pod, adapter: str) -> float:
    """See `CandidatePods.adapter_s`. All pods of a model list it as an adapter, or none does."""
    return pod.adapters.setup_s(adapter, pod.state.speed.pool.adapter_loads.seconds)
