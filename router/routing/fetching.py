"""What a pod still has to do for the part of a prompt that it holds below its pool: to fetch it, or to compute it.

A pod fetches what is sooner fetched than computed, and computes the rest. So a tier costs the lesser of both. The pool
holds the beginning of the prompt, host memory what is behind it, the disk what is behind that: so attention makes a
token dearer to compute the slower the tier is in which it lies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.contract.load import StepCost
from router.routing.latency import prefill_s, told_s
from router.routing.types import PodView
from router.routing.weights import Weights
from router.routing.wide import Floats, WideTiers


def fetch_or_compute_s(pod: PodView, cost: StepCost, uncached: int, prompt: int, weights: Weights) -> float:
    """Seconds for the tokens that the pod holds below its pool. `uncached`: those that it holds nowhere."""
    host, disk, computed_s = pod.host_tokens, pod.disk_tokens, prefill_s(cost, uncached, prompt)
    disk_s = told_s(disk, pod.fetch.disk) or weights.disk_share * cost.token_s * disk
    with_disk_s = prefill_s(cost, uncached + disk, prompt)
    host_s = told_s(host, pod.fetch.host) or weights.host_share * cost.token_s * host
    with_both_s = prefill_s(cost, uncached + disk + host, prompt)
    return min(disk_s, with_disk_s - computed_s) + min(host_s, with_both_s - with_disk_s)


def wide_fetch_or_compute_s(tiers: WideTiers, cost: Any, uncached: Any, prompt: int, weights: Weights) -> Floats:
    """The same for each of many pods; `cost`: numbers or columns by the names of `StepCost`."""
    host, disk, computed_s = tiers.host, tiers.disk, prefill_s(cost, uncached, prompt)
    disk_s = np.where(tiers.disk_s > 0, tiers.disk_s, weights.disk_share * cost.token_s * disk)
    with_disk_s = prefill_s(cost, uncached + disk, prompt)
    host_s = np.where(tiers.host_s > 0, tiers.host_s, weights.host_share * cost.token_s * host)
    with_both_s = prefill_s(cost, uncached + disk + host, prompt)
    seconds: Floats = np.minimum(disk_s, with_disk_s - computed_s) + np.minimum(host_s, with_both_s - with_disk_s)
    return seconds
