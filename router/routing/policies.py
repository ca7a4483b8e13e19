"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.routing.affinity_groups import AffinityGroups
from router.routing.bounded_hash import BoundedHash
from router.routing.cache_aware import CacheAware
from router.routing.least_loaded import LeastLoaded
from router.routing.predicted_ttft import PredictedTtft
from router.routing.prefix_hash import PrefixHash
from router.routing.round_robin import RoundRobin
from router.routing.shares import TrafficShares
from router.views.table import Policy


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of the policies. The defaults suit every workload of tests/router/routing."""

    hash_depth_strides: int = 8
    """prefix_hash, bounded_hash: strides that are hashed; 8 strides of 256 bytes are about 500 tokens."""
    load_bound: float = 1.25
    """bounded_hash, affinity_groups: load a pod may have, relative to the mean; above 1."""
    match_share: float = 0.5
    """cache_aware: a pod holds the prefix if it has at least this share of the longest match, 0 to 1."""
    match_min_prompt_share: float = 0.3
    """cache_aware: if the longest match is below this share of the prompt, no pod holds the prefix, 0 to 1."""
    group_min_pods: float = 1.5
    """affinity_groups: load, in pods' worth, from which a prefix is popular: one pod is enough for less."""
    group_hysteresis_pods: float = 0.75
    """affinity_groups: a group keeps its size while its load is within this many pods of the size; at least 0.5."""
    group_refresh_s: float = 0.5
    """affinity_groups: seconds between two readings of the shares."""
    share_half_life_s: float = 30.0
    """affinity_groups: seconds in which the weight of past traffic halves."""
    share_limit: int = 4096
    """affinity_groups: keys counted. Up to twice as many are kept, which takes about 2 MB."""
    share_depth_strides: int = 128
    """affinity_groups: leading strides of a request that are counted."""

    def __post_init__(self) -> None:
        """Raise ValueError that names the option if one is out of range."""
        positive = ("hash_depth_strides", "group_min_pods", "share_half_life_s", "share_limit", "share_depth_strides")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"policy option {name} must be above 0, not {getattr(self, name)}")
        if not self.group_refresh_s >= 0:
            raise ValueError(f"policy option group_refresh_s must be at least 0, not {self.group_refresh_s}")
        if not self.load_bound > 1:
            raise ValueError(f"policy option load_bound must be above 1, not {self.load_bound}")
        for name in ("match_share", "match_min_prompt_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"policy option {name} must be between 0 and 1, not {getattr(self, name)}")
        if not self.group_hysteresis_pods >= 0.5:
            raise ValueError(
                f"policy option group_hysteresis_pods must be at least 0.5, not {self.group_hysteresis_pods}"
            )


def _affinity_groups(options: PolicyOptions) -> Policy:
    shares = TrafficShares(
        half_life_s=options.share_half_life_s, limit=options.share_limit, depth_strides=options.share_depth_strides
    )
    return AffinityGroups(
        shares,
        min_pods=options.group_min_pods,
        hysteresis=options.group_hysteresis_pods,
        refresh_s=options.group_refresh_s,
        bound=options.load_bound,
    )


_MAKERS: Mapping[str, Callable[[PolicyOptions], Policy]] = MappingProxyType(
    {
        "round_robin": lambda options: RoundRobin(),
        "least_loaded": lambda options: LeastLoaded(),
        "prefix_hash": lambda options: PrefixHash(options.hash_depth_strides),
        "bounded_hash": lambda options: BoundedHash(options.hash_depth_strides, options.load_bound),
        "cache_aware": lambda options: CacheAware(options.match_share, options.match_min_prompt_share),
        "affinity_groups": _affinity_groups,
        "predicted_ttft": lambda options: PredictedTtft(),
    }
)

POLICY_NAMES = tuple(_MAKERS)


def make_policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Return a new policy with state of its own. Raise ValueError, with the known names, for an unknown name."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join(POLICY_NAMES)}")
    return maker(options or PolicyOptions())
