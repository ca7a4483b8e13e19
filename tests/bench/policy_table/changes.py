"""The changes that the ablation plays: a policy without one term, one tie rule or one part of these.

A change sets attributes of modules in the process that plays it: the tables of terms and rules, functions and
constants. No setting exists for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadgen.simulate import gateway
from router.routing import affinity_groups, predicted_ttft, prefill_shares, replication, run, terms, ties
from router.routing.policies import PolicyOptions, make_policy
from router.views import pod_partition
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
            gateway.make_policy = lambda name: make_policy(name, options)  # type: ignore[attr-defined]


def _set(owner: Any, name: str, value: Any) -> Patch:
    return owner, name, lambda _: value


def _without(owner: Any, table: str, part: Callable[..., Any]) -> Change:
    """Return the change that takes `part` out of a table of functions."""
    patch: Patch = (owner, table, lambda parts: tuple(other for other in parts if other is not part))
    cases = {"evict_s": SEVERAL, "unseen_s": SEVERAL, "own_pods_first": SEVERAL, "fetch_s": ("tiers",)}
    return Change(part.__name__, f"`{part.__name__}`", (patch,), cases=cases.get(part.__name__, ()))


def _whole_replication_s(at: terms.Estimate) -> terms.Seconds:
    if not at.owed_s or at.duplicate_s is None:
        return 0.0
    return -np.minimum(at.owed_s, at.duplicate_s)


def _owed_whoever_copied(ledger: replication.Ledger, key: Any, now_s: float, lacking: object = None) -> float:
    return _OWED_S(ledger, key, now_s)


def _plain_ranks(partition: object, rows: object, ranks: Any, pods: int) -> Any:
    return ranks


_OWED_S = replication.Ledger.owed_s


PARTS = (
    Change(
        "replication_part",
        "`replication_s`: less of it for longer prompts than usual",
        ((terms, "REPLICATION_TERMS", lambda _: (_whole_replication_s,)),),
    ),
    Change(
        "share_of_gateways",
        "`replication_s`: requests stand for those of other gateways",
        (_set(RequestInfo, "share", property(lambda _: 1.0)),),
        cases=SEVERAL,
    ),
    Change(
        "copies_elsewhere",
        "`replication_s`: other gateways' copies pay",
        (_set(replication.Ledger, "owed_s", _owed_whoever_copied),),
        cases=SEVERAL,
    ),
    Change("near_matches", "`replication_s`: near matches are one prefix", (_set(replication, "_NEARBY_STRIDES", 1),)),
    Change(
        "bound_on_unseen",
        "`unseen_s`: a bound on pods with the longest match",
        (_set(pod_partition, "_COPY_SHARE", 1e9),),
        cases=SEVERAL,
    ),
    Change("stalls_of_long_prompts", "`stall_s`: its bound by a usual prefill", (_set(terms, "lesser", _unbounded),)),
    Change("ties", "all ties: the lowest score decides", (_set(ties, "TIE_SHARE", 0.0), _set(ties, "UNSHARED_TIE_SHARE", 0.0))),
    Change("unshared_ties", "wider ties while nothing is shared", (_set(ties, "UNSHARED_TIE_SHARE", ties.TIE_SHARE),)),
    Change(
        "partition",
        "the partition of the pods among gateways",
        (
            _set(pod_partition.Gateways, "partition", lambda *_: None),
            _set(prefill_shares.PrefillShares, "partition", lambda *_: None),
        ),
        cases=SEVERAL,
    ),
) if False else ()
