"""The changes that the ablation plays: one term, one rule or one constant each.

A change sets attributes of modules in the process that plays it: the tables of terms and rules, and constants. Nothing
else uses these tables, so no setting exists for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from loadgen.simulate import gateway
from router.routing import affinity_groups, debt, predicted_ttft, prefill_shares, run, terms, ties
from router.routing.policies import PolicyOptions, make_policy
from router.views import pod_partition
from router.views.pod_partition import Parting
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
    """The cases in which the part can do most, most likely first; empty: all."""
    arm: str = PREDICTED

    def apply(self) -> None:
        """Change the policy in this process."""
        gateway.WIDE_FROM = 0  # type: ignore[attr-defined]
        for owner, name, new in self.patches:
            setattr(owner, name, new(getattr(owner, name)))
        if self.options:
            options = PolicyOptions(**self.options)  # type: ignore[arg-type]
            gateway.make_policy = lambda name: make_policy(name, options)  # type: ignore[attr-defined]


def _without(owner: Any, name: str, part: Callable[..., Any]) -> Patch:
    return owner, name, lambda parts: tuple(other for other in parts if other is not part)


def _set(owner: Any, name: str, value: Any) -> Patch:
    return owner, name, lambda _: value


def _times(owner: Any, name: str, factor: float) -> Patch:
    return owner, name, lambda old: old * factor


def _term(name: str, about: str, cases: tuple[str, ...] = ()) -> Change:
    part = getattr(terms, name)
    tables = ("TTFT_TERMS", "DELAY_TERMS")
    return Change(name, about, tuple(_without(terms, table, part) for table in tables), cases=cases)


def _rule(name: str, about: str, cases: tuple[str, ...] = ()) -> Change:
    return Change(name, about, (_without(ties, "RULES", getattr(ties, name)),), cases=cases)


def _instead(owner: Any, name: str, part: Callable[..., Any], other: Callable[..., Any]) -> Patch:
    return owner, name, lambda parts: tuple(other if one is part else one for one in parts)


def _nothing(*_: object, **__: object) -> None:
    return None


def _never(*_: object, **__: object) -> bool:
    return False


def _no_debt(*_: object) -> tuple[None, float]:
    return None, 0.0


def _whole_credit_s(at: terms.Costing) -> terms.Seconds:
    if not at.owed_s or at.pods.matched is None:
        return 0.0
    return np.minimum(at.owed_s, at.duplicate_s + terms.switch_s(at))


def _owed_whoever_copied(debts: debt.Debts, key: Any, now_s: float, lacking: object = None) -> float:
    return _OWED_S(debts, key, now_s)


def _unbounded_tie_s(policy: predicted_ttft.PredictedTtft, own_s: float) -> float:
    return ties.TIE_SHARE * own_s


def _turns_for_all(tie: ties.Tie, rows: Any) -> Any:
    return ties._first(tie, rows, is_warm=True)


def _recent_for_all(tie: ties.Tie, rows: Any) -> Any:
    return ties._first(tie, rows, is_warm=False)


def _own_or_plain_ranks(tie: ties.Tie, rows: Any, ranks: Any, *, is_warm: bool) -> Any:
    return ranks if _all_own(tie, rows) else _RANKS_OF(tie, rows, ranks, is_warm=is_warm)


def _all_own(tie: ties.Tie, rows: Any) -> bool:
    assert tie.at.request.parting is not None
    own = tie.at.request.parting.own_rows(len(tie.at.pods.table))
    return bool(((rows >= own.start) & (rows < own.stop)).all())


_OWED_S, _RANKS_OF = debt.Debts.owed_s, ties.ranks_of
_NO_PARTITION = (
    _set(pod_partition.Gateways, "parting", _nothing),
    _set(prefill_shares.PrefillShares, "parting", _nothing),
)

TERMS = (
    _term("pressure_s", "`pressure_s`: preemption on a full pod"),
    _term("switch_s", "`switch_s`: margin against a further copy"),
    Change("debt", "`copy_credit_s`: debts that make copies", (_set(predicted_ttft.PredictedTtft, "_owed", _no_debt),)),
    _term("externality_s", "`externality_s`: delay of later requests"),
    _term("shared_step_s", "`shared_step_s`: delay of a waiting request"),
    _term("stall_s", "`stall_s`: delay of decoding requests"),
    _term("evict_s", "`evict_s`: what a full pod evicts", ("gateways",)),
    _term("unseen_s", "`unseen_s`: what other gateways just sent", SEVERAL),
    _term("fetch_s", "`fetch_s`: fetching from tiers", ("tiers",)),
    _term("overhead_s", "`overhead_s`: fixed time of a request", ("gateways",)),
    _term("decode_s", "`decode_s`: decoding beside the prefill"),
    _term("queue_s", "`queue_s`: queued prefill"),
    _term("prefill_s", "`prefill_s`: the request's own prefill"),
)
RULES = (
    Change(
        "ties",
        "all ties: only the lowest score",
        (
            _set(ties, "TIE_SHARE", 0.0),
            _set(ties, "UNSHARED_TIE_SHARE", 0.0),
            _set(ties, "running_step_s", lambda _: 0.0),
        ),
    ),
    _rule("even_arrivals", "tie rule: even arrivals at warm pods"),
    _rule("fewest_waiting", "tie rule: fewest waiting requests"),
    _rule("idle_first", "tie rule: idle pods first"),
    _rule("no_shorter_match", "tie rule: no shorter match"),
    _rule("no_longer_prefill", "tie rule: no slower pod", ("gateways", "slow")),
    _rule("by_turn", "tie rule: turns and recent work (a hash decides)"),
    Change(
        "turns",
        "turns on warm pods (recent work everywhere)",
        (_instead(ties, "RULES", ties.by_turn, _recent_for_all),),
    ),
    Change(
        "recent",
        "recent work on cold pods (turns everywhere)",
        (_instead(ties, "RULES", ties.by_turn, _turns_for_all),),
    ),
    Change("running_step", "allowance for the running step's end", (_set(ties, "running_step_s", lambda _: 0.0),)),
    Change("unshared_tie", "wider ties if nothing is shared", (_set(ties, "UNSHARED_TIE_SHARE", ties.TIE_SHARE),)),
    Change(
        "usual_tie",
        "bound of a tie by a usual prompt",
        (_set(predicted_ttft.PredictedTtft, "_tied_s", _unbounded_tie_s),),
    ),
    _rule("own_pods_first", "tie rule: own pods first", SEVERAL),
    Change("partition", "the partition of the pods among gateways", _NO_PARTITION, cases=SEVERAL),
    Change(
        "guest_ranks",
        "order in which a gateway takes others' pods",
        (_set(Parting, "guest_ranks", lambda self, rows, ranks, pods: list(ranks)),),
        cases=SEVERAL,
    ),
    Change(
        "own_parts",
        "fewer turns for a pod owned in part",
        (_set(ties, "ranks_of", _own_or_plain_ranks),),
        cases=SEVERAL,
    ),
)
PARTS = (
    Change(
        "running_step_left",
        "`queue_s`: the rest of the running step",
        (_instead(terms, "TTFT_TERMS", terms.queue_s, lambda at: at.queued_s),),
    ),
    Change(
        "stalling",
        "`stall_s`: bound by a usual prefill",
        (_set(terms.Costing, "stalling_s", property(lambda at: at.prefill_s)),),
    ),
    Change("credit_part", "debts: less credit for unusual prompts", (_set(terms, "copy_credit_s", _whole_credit_s),)),
    Change(
        "debt_share",
        "debts: requests stand for other gateways'",
        (_set(RequestInfo, "share", property(lambda _: 1.0)),),
        cases=SEVERAL,
    ),
    Change(
        "debt_lacking", "debts: others' copies pay", (_set(debt.Debts, "owed_s", _owed_whoever_copied),), cases=SEVERAL
    ),
    Change("debt_nearby", "debts: near matches are one prefix", (_set(debt, "_NEARBY_STRIDES", 1),)),
    Change(
        "spared_unseen", "`unseen_s`: bound on a warm pod", (_set(pod_partition, "_COPY_SHARE", 1e9),), cases=SEVERAL
    ),
    Change(
        "even_shares", "partition: about even shares count as even", (_set(pod_partition, "EQUAL", 0.0),), cases=SEVERAL
    ),
    Change("least_part", "partition: least part of a pod", (_set(pod_partition, "LEAST_PART", 1e-9),), cases=SEVERAL),
    Change(
        "same_speed",
        "about equal speeds count as equal",
        options={"same_speed": 0.0},
        cases=("gateways", "slow", "shared"),
    ),
)
CONSTANTS = (
    *(
        Change(f"tie_{name}", f"TIE_SHARE {factor:g} times", (_times(ties, "TIE_SHARE", factor),))
        for name, factor in (("half", 0.5), ("double", 2.0))
    ),
    *(
        Change(f"evenness_{name}", f"EVENNESS {factor:g} times", (_times(ties, "EVENNESS", factor),))
        for name, factor in (("half", 0.5), ("double", 2.0))
    ),
    *(
        Change(f"stall_{name}", f"stall weight {weight:g}", options={"stall_weight": weight})
        for name, weight in (("half", 0.025), ("double", 0.1))
    ),
    *(
        Change(f"debt_life_{name}", f"half-life of a debt {factor:g} times", (_times(debt, "_HALF_LIFE_S", factor),))
        for name, factor in (("half", 0.5), ("double", 2.0))
    ),
    *(
        Change(
            f"recent_{name}",
            f"half-life of recent work {factor:g} times",
            (_times(predicted_ttft, "_RECENT_HALF_LIFE_S", factor),),
        )
        for name, factor in (("half", 0.5), ("double", 2.0))
    ),
    Change("warm_half", "WARM 0.5 times", (_times(ties, "WARM", 0.5),)),
)
_GROUP_CASES = ("hot", "shared", "chats")


def _group(name: str, about: str, *patches: Patch, **options: float) -> Change:
    return Change(name, about, patches, options, _GROUP_CASES, GROUPS)


AFFINITY = (
    _group("groups", "groups at all", _set(affinity_groups, "_FIRST_REQUESTS", 10**9)),
    _group("turns_in_a_run", "turns of all pods", _set(affinity_groups.AffinityGroups, "_takes_turns", _never)),
    _group("pair", "turns from the second prompt on", _set(run.Run, "is_pair", _never)),
    _group("homes", "pods that hold recurring text first", _set(affinity_groups, "_EVEN_AT_HOME", -1e9)),
    _group("even_at_home", "evenness at such pods", _set(affinity_groups, "_EVEN_AT_HOME", 1e9)),
    _group(
        "one_evenness",
        "a bound of its own for such pods",
        _set(affinity_groups, "_EVEN_AT_HOME", affinity_groups._EVEN),
    ),
    _group("even", "evenness for new prefixes", _set(affinity_groups, "_EVEN", 1e9)),
    _group("bound", "the bound on requests in flight", load_bound=1e9),
    _group("hysteresis", "hysteresis of group sizes (the least possible)", group_hysteresis_pods=0.5),
    _group("full", "groups avoid full pods", _set(affinity_groups, "_FULL", 1e9)),
    _group("first_requests", "no groups before 20 requests", _set(affinity_groups, "_FIRST_REQUESTS", 0)),
    _group("near", "nearness: half of a prompt", _set(affinity_groups, "_NEAR", 0.0)),
)

# The cases of each part, the one most likely to speak for it first.
_CASES: Mapping[str, tuple[str, ...]] = {
    "pressure_s": ("tiers", "shared", "chats"),
    "switch_s": ("shared", "tiers", "gateways"),
    "debt": ("hot", "shared", "gateways"),
    "externality_s": ("shared", "slow", "trace"),
    "shared_step_s": ("shared", "unshared", "hot"),
    "stall_s": ("chats", "shared", "hot"),
    "decode_s": ("shared", "slow", "trace"),
    "queue_s": ("unshared",),
    "prefill_s": ("shared",),
    "ties": ("unshared", "hot", "shared"),
    "even_arrivals": ("hot", "chats", "shared"),
    "fewest_waiting": ("hot", "shared", "unshared"),
    "idle_first": ("hot", "unshared", "shared"),
    "no_shorter_match": ("shared", "hot", "chats"),
    "no_longer_prefill": ("slow", "gateways"),
    "by_turn": ("unshared", "hot"),
    "turns": ("hot", "shared", "chats"),
    "recent": ("unshared", "shared", "trace"),
    "running_step": ("hot", "shared", "chats"),
    "unshared_tie": ("unshared",),
    "usual_tie": ("trace", "shared"),
    "running_step_left": ("hot", "shared"),
    "stalling": ("trace", "chats"),
    "credit_part": ("hot", "shared"),
    "debt_share": ("gateways",),
    "debt_lacking": ("gateways",),
    "debt_nearby": ("shared", "gateways"),
    "even_shares": ("gateways",),
    "least_part": ("gateways",),
    "same_speed": ("gateways", "slow"),
}
CHANGES = tuple(
    replace(change, cases=_CASES.get(change.name, change.cases))
    for change in (*TERMS, *RULES, *PARTS, *AFFINITY, *CONSTANTS)
)
