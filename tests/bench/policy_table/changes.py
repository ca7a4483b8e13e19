"""The changes that the ablation plays: a policy without one term, one tie rule or one part of these.

A change sets attributes of modules in the process that plays it: the tables of terms and rules, functions and
constants. No setting exists for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from loadgen.simulate import gateway
from router.routing import affinity_groups, prefill_shares, replication, run, terms, ties
from router.routing.affinity_groups import AffinityGroups
from router.routing.policies import PolicyOptions, make_policy
from router.views import pod_partition
from router.views.pod_partition import PodPartition
from router.views.table import Seconds
from router.views.types import RequestInfo

Patch = tuple[Any, str, Callable[[Any], Any]]
"""Object, name of its attribute, and the new value from the old one."""
PREDICTED, GROUPS = "predicted_ttft", "affinity_groups"
SEVERAL = ("gateways", "tiers")
"""The cases with several gateways."""


@dataclass(frozen=True)
class Change:
    """One change of a policy."""

    name: str
    about: str
    patches: tuple[Patch, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)
    """Fields of `PolicyOptions`."""
    cases: tuple[str, ...] = ()
    """The cases in which the part does anything; empty: all."""
    arm: str = PREDICTED

    def apply(self) -> None:
        """Change the policy in this process."""
        for owner, name, new in self.patches:
            setattr(owner, name, new(getattr(owner, name)))
        if self.options:
            options = PolicyOptions(**self.options)  # type: ignore[arg-type]
            setattr(gateway, "make_policy", lambda name: make_policy(name, options))  # noqa: B010


def _set(owner: Any, name: str, value: Any) -> Patch:
    return owner, name, lambda _: value


def _instead(owner: Any, table: str, part: Callable[..., Any], other: Callable[..., Any]) -> Patch:
    return owner, table, lambda parts: tuple(other if one is part else one for one in parts)


def _without(owner: Any, table: str, part: Callable[..., Any]) -> Change:
    """Return the change that takes `part` out of a table of functions."""
    patch: Patch = (owner, table, lambda parts: tuple(other for other in parts if other is not part))
    cases = {"evict_s": SEVERAL, "unseen_s": SEVERAL, "own_pods_first": SEVERAL, "fetch_s": ("tiers",)}
    return Change(part.__name__, f"`{part.__name__}`", (patch,), cases=cases.get(part.__name__, ()))


def _part(name: str, about: str, *patches: Patch, cases: tuple[str, ...] = (), **options: float) -> Change:
    return Change(name, about, patches, options, cases)


def _group(name: str, about: str, *patches: Patch, **options: float) -> Change:
    return Change(name, f"`affinity_groups`: {about}", patches, options, ("hot", "shared", "chats", "trace"), GROUPS)


def _whole_replication_s(at: terms.Estimate) -> Seconds:
    """Return `replication_s` without the part for longer prompts than usual."""
    if not at.owed_s or at.duplicate_s is None:
        return 0.0
    return cast(Seconds, -np.minimum(at.owed_s, at.duplicate_s))


def _begun_s(at: terms.Estimate) -> Seconds:
    """Return `queue_s` without the rest of the running step."""
    return at.queued_s


_OWED_S = replication.Ledger.owed_s


def _owed_whoever_copied(ledger: replication.Ledger, key: Any, now_s: float, lacking: object = None) -> float:
    return _OWED_S(ledger, key, now_s)


_TERMS = (
    *(_without(terms, "TTFT_TERMS", term) for term in terms.TTFT_TERMS if term is not terms.adapter_s),
    *(_without(terms, "DELAY_TERMS", term) for term in terms.DELAY_TERMS),
    *(_without(terms, "REPLICATION_TERMS", term) for term in terms.REPLICATION_TERMS),
)
"""Every term but `adapter_s`: no simulated pod loads adapters."""
_RULES = tuple(_without(ties, "RULES", rule) for rule in ties.RULES if rule is not ties.close_score)
"""Every rule for ties but `close_score`, which makes a tie; see `ties`."""
_PARTS = (
    _part(
        "running_step",
        "the rest of the running step in `queue_s`",
        _instead(terms, "TTFT_TERMS", terms.queue_s, _begun_s),
    ),
    _part(
        "longer_prompts",
        "the lesser `replication_s` of longer prompts",
        _instead(terms, "REPLICATION_TERMS", terms.replication_s, _whole_replication_s),
    ),
    _part("near_matches", "near matches as one prefix in `replication_s`", _set(replication, "_NEARBY_STRIDES", 1)),
    _part(
        "share_of_gateways",
        "requests that stand for other gateways' in `replication_s`",
        _set(RequestInfo, "share", property(lambda _: 1.0)),
        cases=SEVERAL,
    ),
    _part(
        "copies_elsewhere",
        "other gateways' copies in `replication_s`",
        _set(replication.Ledger, "owed_s", _owed_whoever_copied),
        cases=SEVERAL,
    ),
    _part(
        "bound_on_unseen",
        "the bound of `unseen_s` on warm pods",
        _set(pod_partition, "_COPY_SHARE", 1e9),
        cases=SEVERAL,
    ),
    _part(
        "ties",
        "all ties: the lowest score decides",
        _set(ties, "TIE_SHARE", 0.0),
        _set(ties, "UNSHARED_TIE_SHARE", 0.0),
    ),
    _part("unshared_ties", "wider ties while nothing is shared", _set(ties, "UNSHARED_TIE_SHARE", ties.TIE_SHARE)),
    _part(
        "guest_ranks",
        "the order in which a gateway takes others' pods",
        _set(PodPartition, "guest_ranks", lambda partition, rows, ranks, pods: list(ranks)),
        cases=SEVERAL,
    ),
    _part(
        "partition",
        "the partition of the pods among gateways",
        _set(pod_partition.Gateways, "partition", lambda *_: None),
        _set(prefill_shares.PrefillShares, "partition", lambda *_: None),
        cases=SEVERAL,
    ),
    _part("even_shares", "about even shares that count as even", _set(pod_partition, "EQUAL", 0.0), cases=SEVERAL),
)
_GROUPS = (
    _group("groups", "groups at all", _set(affinity_groups, "_FIRST_REQUESTS", 10**9)),
    _group("turns", "turns of all pods", _set(AffinityGroups, "_takes_turns", lambda *_: False)),
    _group("pair", "turns from the second prompt on", _set(run.Run, "is_pair", lambda *_: False)),
    _group("homes", "pods that hold recurring text first", _set(affinity_groups, "_EVEN_AT_HOME", -1e9)),
    _group("even_at_home", "a wider bound there", _set(affinity_groups, "_EVEN_AT_HOME", affinity_groups._EVEN)),
    _group("even", "evenness for new prefixes", _set(affinity_groups, "_EVEN", 1e9)),
    _group("full", "groups that avoid full pods", _set(affinity_groups, "_FULL", 1e9)),
    _group("first_requests", "no groups before 20 requests", _set(affinity_groups, "_FIRST_REQUESTS", 0)),
    _group("near", "nearness: half of a prompt", _set(affinity_groups, "_NEAR", 0.0)),
    _group("hysteresis", "hysteresis of group sizes", group_hysteresis_pods=0.5),
)
CHANGES = (*_TERMS, *_RULES, *_PARTS, *_GROUPS)
