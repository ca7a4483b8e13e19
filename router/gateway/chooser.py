"""Choose a pod: match the keys, look at the pods, ask the policy, remember the choice, learn from the answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.keys import PrefixKey
from router.fleet.pod import Clock, Pod
from router.gateway.errors import NoEngine
from router.gateway.estimates import Estimates
from router.gateway.inbound import RETRY_AFTER_S, Inbound
from router.gateway.registry import RegistryView
from router.gateway.shadow import Shadows
from router.gateway.tables import WIDE_FROM, Tables
from router.gateway.usage import Usage
from router.registry.index import Match, PrefixIndex
from router.registry.room import Taken
from router.routing.affinity_groups import AffinityGroups
from router.routing.predicted_ttft import PredictedTtft
from router.routing.shares import TrafficShares
from router.routing.types import Decision, PodId, PodView, Policy, RequestInfo
from router.routing.wide import WidePolicy
from router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FALLBACK_POLICY = "bounded_hash"
INDEX_POLICIES = frozenset(("cache_aware", "predicted_ttft"))
"""Policies that choose by what the index says, and so by nothing once the registry has expired."""
EXPIRY_CHECK_S = 0.25
TOKENS_PER_BYTE_RANGE = (0.02, 2.0)
"""Ratios outside come from prompts that are not text (images), and teach nothing about text."""
NO_MATCH = Match(0)


@dataclass(slots=True)
class Choice:
    """Where a request goes. `strides`: leading prefix keys the pod was believed to hold."""

    pod: Pod
    policy: str
    decision: Decision
    strides: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens expected to be reused."""
        return self.decision.predicted_cached_tokens


class ServingPods(Protocol):
    """The pods to choose among: `router.fleet.fleet.Fleet`, or a simulated fleet."""

    def pods(self, model: str) -> Sequence[Pod]:
        """Those that take requests for the model, in stable order."""
        ...


class Chooser:
    """The decision of a request. Nothing in it waits, so what it reads and what it records belong together."""

    def __init__(
        self,
        fleet: ServingPods,
        index: PrefixIndex,
        registry: RegistryView,
        make_policies: Callable[[], Mapping[str, Policy]],
        estimates: Estimates,
        metrics: Metrics,
        *,
        clock: Clock,
        stride: int,
        speculation_ttl_s: float,
        foreign_ttl_s: float,
        shadows: Shadows | None = None,
        wide_from: int = WIDE_FROM,
    ) -> None:
        """`make_policies`: every policy by name, new. Each model has its own: models share neither pods nor keys.
        `wide_from`: pods from which all are looked at at once, by policies that can."""
        self._clock = clock
        self._fleet = fleet
        self._index = index
        self._registry = registry
        self._make_policies = make_policies
        self._policies: dict[str, Mapping[str, Policy]] = {}
        self._estimates = estimates
        self._metrics = metrics
        self._stride = stride
        self._speculation_ttl_s = speculation_ttl_s
        self._foreign_ttl_s = foreign_ttl_s
        self._shadows = shadows
        self._tables = Tables()
        self._wide_from = wide_from
        self._is_expired = False
        self._check_at_s = -math.inf

    def choose(self, inbound: Inbound, excluded: Collection[PodId] = ()) -> Choice:
        """The pod for the request, which from here on counts as holding its keys. Raises Unavailable."""
        started_s = time.perf_counter()
        now_s = self._clock()
        choice, _, views = self._decide(inbound, excluded, now_s)
        if choice.policy != inbound.policy:
            self._metrics.fell_back()
        self._remember(choice.pod, inbound, now_s)
        self._metrics.decided(time.perf_counter() - started_s)
        if self._shadows is not None and not excluded:  # a retry is no further request
            self._shadows.compare(inbound.model, choice.decision, self._info(inbound, now_s), views, self._in_force)
        return choice

    def explain(self, inbound: Inbound) -> tuple[Choice, Sequence[Pod], Sequence[PodView]]:
        """What `choose` would do, with every pod's score, leaving no trace. Raises Unavailable."""
        return self._decide(inbound, (), self._clock(), explain=True)

    def least_ttft_s(self, inbound: Inbound) -> float:
        """Predicted seconds to the first token, on the pod where it would come first. Leaves no trace. Raises
        Unavailable."""
        now_s = self._clock()
        pods = self._pods(inbound, ())
        views = self._views(inbound, pods, self._index.match(inbound.keys, now_s), now_s)
        predictor = self._policies_of(inbound.model)["predicted_ttft"]
        assert isinstance(predictor, PredictedTtft)
        return min(predictor.ttfts_s(self._info(inbound, now_s), views))

    def patience_s(self, inbound: Inbound, without_room: Collection[PodId]) -> float:
        """Seconds that the request had better wait for one of the pods `without_room` than go to another: what the
        other would compute a second time. 0: there is nothing to win. Leaves no trace.

        Whoever waits as long as what it waits for would cost, loses at most as much again (ski rental).
        """
        matches = self._index.match(inbound.keys, self._clock())
        pods = self._fleet.pods(inbound.model)
        longest = {pod.pod_id: matches[pod.pod_id].strides for pod in pods if pod.pod_id in matches}
        there = max((strides for pod, strides in longest.items() if pod in without_room), default=0)
        elsewhere = max((strides for pod, strides in longest.items() if pod not in without_room), default=0)
        if there <= elsewhere:
            return 0.0
        token_s = min(pod.state.cost.token_s for pod in pods if pod.pod_id not in without_room)
        return (there - elsewhere) * inbound.tokens_per_stride * token_s

    def _decide(
        self, inbound: Inbound, excluded: Collection[PodId], now_s: float, *, explain: bool = False
    ) -> tuple[Choice, Sequence[Pod], Sequence[PodView]]:
        pods = self._pods(inbound, excluded)
        policy = self._policy(inbound, now_s)
        if len(pods) >= self._wide_from:
            if isinstance(policy, WidePolicy) and not excluded and not explain and self._shadows is None:
                return self._decide_wide(inbound, policy, pods, now_s), pods, ()
        elif inbound.model in self._tables and not excluded:
            self._tables.drop(inbound.model)
        matches = self._index.match(inbound.keys, now_s)
        views = self._views(inbound, pods, matches, now_s)
        decision = policy.choose(self._info(inbound, now_s), views, explain=explain)
        pod = pods[decision.pod]
        return Choice(pod, policy.name, decision, matches.get(pod.pod_id, NO_MATCH).strides), pods, views

    def _decide_wide(self, inbound: Inbound, policy: WidePolicy, pods: Sequence[Pod], now_s: float) -> Choice:
        """As `_decide`, without a view of each pod."""
        table = self._tables.of(inbound.model, pods)
        seen, per_stride, prompt_tokens = table.at(now_s), inbound.tokens_per_stride, inbound.prompt_tokens
        sets, tiers = self._index.match_sets(inbound.keys, now_s)
        for pod_ids, strides in sets:
            seen.hold(table.rows(pod_ids), min(int(strides * per_stride), prompt_tokens))
        for pod_id, match in tiers.items():
            if (row := table.row(pod_id)) is not None:
                host_tokens = min(int(match.host_strides * per_stride), prompt_tokens)
                seen.fetch(row, host_tokens, min(int(match.disk_strides * per_stride), prompt_tokens))
        decision = policy.choose_wide(self._info(inbound, now_s), seen)
        held = next((strides for pod_ids, strides in reversed(sets) if decision.pod in table.rows(pod_ids)), 0)
        return Choice(pods[decision.pod], policy.name, decision, held)

    def undo(self, inbound: Inbound, choice: Choice) -> None:
        """The request did not run on the chosen pod."""
        self._index.retract(choice.pod.pod_id, inbound.keys)

    def learn(self, inbound: Inbound, choice: Choice, usage: Usage) -> None:
        """What the answer said of its tokens: ratios of the model, and whether the pod held what was believed.

        `usage` gets the cached tokens that the engine left out because there were none.
        """
        estimate = self._estimates.of(inbound.model)
        if usage.completion_tokens:
            estimate.saw_output(usage.completion_tokens / inbound.prompts)
        if usage.prompt_tokens and inbound.teaches_tokens and inbound.prompt_bytes:
            low, high = TOKENS_PER_BYTE_RANGE
            if low < usage.prompt_tokens / inbound.prompt_bytes < high:
                estimate.saw_prompt(inbound.prompt_bytes, usage.prompt_tokens)
        if usage.cached_tokens is not None:
            choice.pod.tells_cached_tokens = True
        elif usage.is_final and usage.prompt_tokens and choice.pod.tells_cached_tokens:
            usage.cached_tokens = 0  # vLLM and SGLang say what they reused where that is not 0
        if usage.cached_tokens is not None:
            if inbound.prompts == 1:  # else the counts are those of prompts whose keys are not known here
                self._correct(inbound, choice, usage.cached_tokens, usage.prompt_tokens or inbound.prompt_tokens)
            self._metrics.cached(
                choice.policy,
                prompt_tokens=usage.prompt_tokens or inbound.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                predicted_tokens=choice.cached_tokens,
            )

    def _correct(self, inbound: Inbound, choice: Choice, cached_tokens: int, prompt_tokens: int) -> None:
        """Refute what the pod turned out not to hold.

        The slack covers that cached tokens come in blocks and that bytes do not map to tokens evenly.
        """
        held = math.ceil(cached_tokens / prompt_tokens * inbound.prompt_bytes / self._stride)
        slack = 2 + choice.strides // 8
        pod = choice.pod
        if abs(held - choice.strides) <= slack:
            return
        if pod not in self._fleet.pods(inbound.model):  # it has left, and is forgotten
            return
        if held > choice.strides:
            tokens = cached_tokens - choice.strides * inbound.tokens_per_stride
            self._index.was_held(pod.pod_id, inbound.keys, choice.strides, tokens)
            return
        now_s = self._clock()
        self._index.refute(pod.pod_id, inbound.keys, held, now_s)
        self._remember(pod, inbound, now_s, is_first=False)  # the prompt has been computed there by this answer

    def _remember(self, pod: Pod, inbound: Inbound, now_s: float, *, is_first: bool = True) -> None:
        """Believe that the pod holds the request's keys. `is_first`: the request is new to it, and takes room."""
        if self._registry.reports(pod.pod_id):
            self._index.speculate(pod.pod_id, inbound.keys, now_s, self._speculation_ttl_s)
        else:
            tokens = inbound.prompt_tokens + inbound.output_tokens if is_first else 0
            self.believe(pod, inbound.keys, now_s, tokens=tokens, key_tokens=inbound.tokens_per_stride)

    def believe(
        self, pod: Pod, keys: Sequence[PrefixKey], now_s: float, *, tokens: int, key_tokens: float
    ) -> None:
        """A request with these keys went to a pod that publishes nothing, from this gateway or another one.

        `tokens`: of its prompt and expected answer, 0 where they were counted before. `key_tokens`: that a key stands
        for, on average.
        """
        facts = pod.facts
        capacity = facts.kv_capacity_tokens
        ttl_s = self._foreign_ttl_s if capacity is None else math.inf
        taken = Taken(tokens, key_tokens, capacity, facts.block_tokens)
        self._index.speculate(pod.pod_id, keys, now_s, ttl_s, taken)

    def _pods(self, inbound: Inbound, excluded: Collection[PodId]) -> Sequence[Pod]:
        pods: Sequence[Pod] = self._fleet.pods(inbound.model)
        if excluded:
            pods = [pod for pod in pods if pod.pod_id not in excluded]
        if not pods:
            raise NoEngine(inbound.model, retry_after_s=RETRY_AFTER_S)
        return pods

    def traffic_shares(self) -> dict[str, TrafficShares]:
        """The counters behind `affinity_groups`, by model: what gateways exchange."""
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
        return policies

    def _in_force(self, policy: str) -> str:
        return FALLBACK_POLICY if self._is_expired and policy in INDEX_POLICIES else policy

    def _views(
        self, inbound: Inbound, pods: Sequence[Pod], matches: Mapping[PodId, Match], now_s: float
    ) -> list[PodView]:
        per_stride, prompt_tokens = inbound.tokens_per_stride, inbound.prompt_tokens
        index, views = self._index, []
        regrets = index.regret > 0
        for pod in pods:
            match = matches.get(pod.pod_id)
            if match is None:
                view = pod.state.view(pod.pod_id, now_s=now_s)
            else:
                tokens = min(int(match.strides * per_stride), prompt_tokens)
                view = pod.state.view(pod.pod_id, now_s=now_s, matched_tokens=tokens)
                if match.host_strides or match.disk_strides:
                    view.host_tokens = min(int(match.host_strides * per_stride), prompt_tokens)
                    view.disk_tokens = min(int(match.disk_strides * per_stride), prompt_tokens)
            view.weight = pod.weight
            if regrets:
                view.room_tokens = index.room_tokens(pod.pod_id)
            views.append(view)
        return views

    def _info(self, inbound: Inbound, now_s: float) -> RequestInfo:
        return RequestInfo(inbound.keys, inbound.prompt_tokens, now_s, inbound.output_tokens, self._index.regret)
