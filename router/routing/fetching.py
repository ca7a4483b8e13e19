"""The cost of the part of a prompt that a pod holds below its pool: the pod fetches or computes it.

A pod fetches a part if that is faster than computing it, so a tier costs the lesser of both. The pool holds the
beginning of the prompt, host memory the part behind it, and the disk the part behind that. A later token needs more
attention, so the slower the tier of a token, the dearer the token is to compute.

Behind these parts come tokens that the pod can fetch from the folder that pods share. No pod publishes which keys the
folder has, because each pod would publish all of them, and the list would soon be wrong. A pod copies what it holds to
the folder if the copy is worth its cost. So each pod with a shared tier can fetch what another such pod holds. Keys in
the folder that no pod holds any more are equally near to all pods, so they do not affect the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.contract.fetch_costs import is_worth_it
from engine.contract.load import StepCost
from router.routing.weights import Weights
from router.views.latency import prefill_s, told_s
from router.views.table import Floats, WidePods, WideTiers
from router.views.types import PodView


def fetch_or_compute_s(pod: PodView, cost: StepCost, uncached: int, prompt: int, weights: Weights) -> float:
    """Return the seconds to fetch or compute tokens in tiers below the pod's pool. `uncached`: tokens in no tier."""
    host, disk, shared = pod.host_tokens, pod.disk_tokens, pod.shared_tokens
    computed_s = prefill_s(cost, uncached, prompt)
    with_shared_s = prefill_s(cost, uncached + shared, prompt)
    disk_s = told_s(disk, pod.fetch.disk) or weights.disk_share * cost.token_s * disk
    with_disk_s = prefill_s(cost, uncached + shared + disk, prompt)
    host_s = told_s(host, pod.fetch.host) or weights.host_share * cost.token_s * host
    with_both_s = prefill_s(cost, uncached + shared + disk + host, prompt)
    shared_s = min(told_s(shared, pod.fetch.shared), with_shared_s - computed_s)
    return shared_s + min(disk_s, with_disk_s - with_shared_s) + min(host_s, with_both_s - with_disk_s)


def wide_fetch_or_compute_s(tiers: WideTiers, cost: Any, uncached: Any, prompt: int, weights: Weights) -> Floats:
    """Return `fetch_or_compute_s` of each of many pods; `cost`: numbers or columns by the names of `StepCost`."""
    host, disk, shared = tiers.host, tiers.disk, tiers.shared
    computed_s = prefill_s(cost, uncached, prompt)
    with_shared_s = prefill_s(cost, uncached + shared, prompt)
    disk_s = np.where(tiers.disk_s > 0, tiers.disk_s, weights.disk_share * cost.token_s * disk)
    with_disk_s = prefill_s(cost, uncached + shared + disk, prompt)
    host_s = np.where(tiers.host_s > 0, tiers.host_s, weights.host_share * cost.token_s * host)
    with_both_s = prefill_s(cost, uncached + shared + disk + host, prompt)
    shared_s = np.minimum(tiers.shared_s, with_shared_s - computed_s)
    disk_s = np.minimum(disk_s, with_disk_s - with_shared_s)
    seconds: Floats = shared_s + disk_s + np.minimum(host_s, with_both_s - with_disk_s)
    return seconds


def add_shared(views: Sequence[PodView]) -> None:
    """Set `shared_tokens` of each pod that fetches tokens from the shared tier faster than it computes them. At least
    one pod must have such a tier."""
    longest = max([view.matched_tokens for view in views if view.fetch.shared.token_s])
    for view in views:
        tokens, shared = longest - view.matched_tokens, view.fetch.shared
        if tokens > 0 and (seconds := told_s(tokens, shared)) and is_sooner(seconds, tokens, view.cost.token_s):
            view.shared_tokens = tokens


def reaching(pods: Sequence[PodView]) -> Sequence[PodView]:
    """Return the pods with their `shared_tokens` counted as matched, because they need not compute them."""
    if not any([pod.shared_tokens for pod in pods]):  # noqa: C419 - a generator would take twice as long
        return pods
    return [
        replace(pod, matched_tokens=pod.matched_tokens + pod.shared_tokens) if pod.shared_tokens else pod
        for pod in pods
    ]


def wide_add_shared(pods: WidePods) -> None:
    """As `add_shared`, for many pods."""
    matched, columns = pods.matched, pods.columns
    reaches = columns.shared_token_s > 0
    if matched is None or not reaches.any():
        return
    longest = float(matched[reaches].max())
    tokens = np.maximum(longest - matched, 0.0)
    seconds = columns.shared_latency_s + columns.shared_token_s * tokens
    takes = reaches & (tokens > 0) & is_sooner(seconds, tokens, columns.token_s)
    if takes.any():
        if pods.tiers is None:
            pods.tiers = WideTiers.none(len(pods.table))
        pods.tiers.shared[takes], pods.tiers.shared_s[takes] = tokens[takes], seconds[takes]


def wide_reaching(pods: WidePods) -> WidePods:
    """As `reaching`, for many pods."""
    if pods.tiers is None or pods.matched is None or not pods.tiers.shared.any():
        return pods
    return replace(pods, matched=pods.matched + pods.tiers.shared)


def is_sooner(seconds: Any, tokens: Any, token_s: Any) -> Any:
    """Whether an engine that computes a token in `token_s` fetches `tokens` in `seconds` instead; numbers or columns.
    Attention, which makes computing dearer, is left out: when in doubt, the engine computes."""
    return is_worth_it(seconds, token_s * tokens)
