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

from dataclasses import replace
from typing import Any

import numpy as np

from engine.contract.fetch_costs import is_worth_it
from router.views.latency import prefill_s
from router.views.table import CandidatePods, Floats, TierTokens

HOST_SHARE = 0.2
"""Seconds to fetch a token from host memory, as a share of its prefill, until the pod reports them. The pod fetches
only if that is faster than prefill, so the true share lies between 0 and 1."""
DISK_SHARE = 0.5
"""The same for disk."""


def fetch_or_compute_s(tiers: TierTokens, cost: Any, uncached: Any, prompt: int) -> Floats:
    """Return the seconds to fetch or compute tokens in tiers below each pod's pool. `cost`: numbers or columns by the
    names of `StepCost`; `uncached`: tokens in no tier."""
    host, disk, shared = tiers.host, tiers.disk, tiers.shared
    computed_s = prefill_s(cost, uncached, prompt)
    with_shared_s = prefill_s(cost, uncached + shared, prompt)
    disk_s = np.where(tiers.disk_s > 0, tiers.disk_s, DISK_SHARE * cost.token_s * disk)
    with_disk_s = prefill_s(cost, uncached + shared + disk, prompt)
    host_s = np.where(tiers.host_s > 0, tiers.host_s, HOST_SHARE * cost.token_s * host)
    with_both_s = prefill_s(cost, uncached + shared + disk + host, prompt)
    shared_s = np.minimum(tiers.shared_s, with_shared_s - computed_s)
    disk_s = np.minimum(disk_s, with_disk_s - with_shared_s)
    seconds: Floats = shared_s + disk_s + np.minimum(host_s, with_both_s - with_disk_s)
    return seconds


def add_shared(pods: CandidatePods) -> None:
    """Set the `shared` tokens of each pod that fetches them from the shared tier faster than it computes them."""
    matched, columns = pods.matched, pods.columns
    if matched is None or not pods.table.has_shared_tier:
        return
    reaches = columns.shared_token_s > 0
    longest = float(matched[reaches].max())
    tokens = np.maximum(longest - matched, 0.0)
    seconds = columns.shared_latency_s + columns.shared_token_s * tokens
    takes = reaches & (tokens > 0) & is_sooner(seconds, tokens, columns.token_s)
    if takes.any():
        if pods.tiers is None:
            pods.tiers = TierTokens.none(len(pods.table))
        pods.tiers.shared[takes], pods.tiers.shared_s[takes] = tokens[takes], seconds[takes]


def reaching(pods: CandidatePods) -> CandidatePods:
    """Return the pods with their `shared` tokens counted as matched, because they need not compute them."""
    if pods.tiers is None or pods.matched is None or not pods.tiers.shared.any():
        return pods
    return replace(pods, matched=pods.matched + pods.tiers.shared)


def is_sooner(seconds: Any, tokens: Any, token_s: Any) -> Any:
    """Whether an engine that computes a token in `token_s` fetches `tokens` in `seconds` instead; numbers or columns.
    Attention, which makes computing dearer, is left out: when in doubt, the engine computes."""
    return is_worth_it(seconds, token_s * tokens)
