"""The pods of a model as columns of numbers, kept current, so that a decision handles all pods at once.

A pod's row is rebuilt only if something happened to the pod. What drains with the clock is computed by numpy for all
rows at once. A loop over a thousand pods would take 8 ms a decision.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.contract.fetch_costs import FetchCosts
from engine.contract.load import StepCost
from router.views.latency import has_fixed, told_s, unit_s
from router.views.pod_row import PodRow
from router.views.types import Decision, PodId, RequestInfo

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Seconds = float | Floats
"""A number for each pod, or one for all."""
_SETS_REMEMBERED = 1024
_COLUMNS = len(PodRow._fields)


@dataclass(frozen=True, slots=True)
class TierTokens:
    """The tokens of the prompt that each pod has in its slower tiers, below its pool, and the seconds to fetch them as
    the pod reports them, or 0. `shared`: tokens that a pod does not hold but can fetch."""

    host: Floats
    disk: Floats
    shared: Floats
    host_s: Floats
    disk_s: Floats
    shared_s: Floats

    @staticmethod
    def none(pods: int) -> TierTokens:
        """Return tiers of `pods` pods that hold nothing."""
        return TierTokens(*np.zeros((len(fields(TierTokens)), pods)))


@dataclass(slots=True)
class CandidatePods:
    """The pods that may serve a request, at the moment of the decision: what a policy sees of them. A number for each
    pod, in the order of the table."""

    table: PodTable
    columns: PodRow[Floats]
    matched: Floats | None = None
    """Prompt tokens whose KV each pod is believed to hold, in any tier; None: no pod holds anything."""
    longest: int = 0
    """The greatest of `matched`."""
    tiers: TierTokens | None = None
    """None: no pod holds anything below its pool."""
    free_tokens: Floats | None = None
    """Tokens that each pod's cache can take before it evicts something, infinite if unknown; None: room does not
    count."""
    adapter_s: Floats | None = None
    """Seconds until the adapter that the request wants is loaded, 0 if it is or if nothing is known; None: it wants
    none."""

    def hold(self, rows: Ints, tokens: int) -> None:
        """Note that the pods in `rows` hold `tokens` of the prompt. A later call, for fewer pods and more tokens,
        replaces the number of these pods."""
        if self.matched is None:
            self.matched = np.zeros(len(self.table))
        self.matched[rows] = tokens
        self.longest = max(self.longest, tokens if len(rows) else 0)

    def fetch(self, row: int, host_tokens: int, disk_tokens: int) -> None:
        """Set how many of its tokens the pod in `row` holds in host memory and on disk."""
        if self.tiers is None:
            self.tiers = TierTokens.none(len(self.table))
        tiers, costs = self.tiers, self.table.fetch_costs(row)
        tiers.host[row], tiers.disk[row] = host_tokens, disk_tokens
        tiers.host_s[row] = told_s(host_tokens, costs.host)
        tiers.disk_s[row] = told_s(disk_tokens, costs.disk)

    def matched_by(self, row: int) -> int:
        """Return the prompt tokens that the pod in `row` holds."""
        return 0 if self.matched is None else int(self.matched[row])

    def of(self, row: int, now_s: float) -> dict[str, Any]:
        """Return what is known of the pod in `row`, by name, for people."""
        columns, tiers, free = self.columns, self.tiers, self.free_tokens
        return {
            "matched_tokens": self.matched_by(row),
            "host_tokens": 0 if tiers is None else int(tiers.host[row]),
            "disk_tokens": 0 if tiers is None else int(tiers.disk[row]),
            "shared_tokens": 0 if tiers is None else int(tiers.shared[row]),
            "in_flight": int(columns.in_flight[row]),
            "uncached_tokens": int(self.uncached(now_s)[row]),
            "decoding": int(columns.decoding[row]),
            "context_tokens": int(columns.context_tokens[row]),
            "queue_s": max(0.0, float(self.free_at_s(now_s)[row]) - now_s),
            "cost": asdict(self.table.costs[row]),
            "cost_is_prior": bool(columns.is_prior[row]),
            "overhead_s": float(columns.overhead_s[row]),
            "weight": float(columns.weight[row]),
            "adapter_s": 0.0 if self.adapter_s is None else float(self.adapter_s[row]),
            "room_tokens": None if free is None or np.isinf(free[row]) else float(free[row]),
        }

    def free_at_s(self, now_s: float) -> Floats:
        """Return the predicted times at which each pod's queued prefill ends; in the past for an idle pod. Do not
        change the array."""
        columns, table = self.columns, self.table
        free_s = columns.free_at_s
        if table.is_any_late(now_s):
            late = (columns.due_s < now_s).nonzero()[0]
            free_s = free_s.copy()
            again_s = 2 * now_s - columns.due_s[late] + columns.late_step_s[late]
            free_s[late] = np.maximum(free_s[late], again_s)
        if table.is_any_behind(now_s):
            behind = (columns.others_until_s > now_s).nonzero()[0]
            others_s = columns.others_trust[behind] * (columns.others_until_s[behind] - now_s)
            free_s = free_s.copy()
            free_s[behind] = np.maximum(free_s[behind], now_s) + others_s
        return free_s

    def least_token_s(self, without: Collection[PodId]) -> float:
        """Return the seconds of prefill of a token on the fastest pod that is not in `without`."""
        token_s = self.columns.token_s.copy()
        token_s[self.table.rows(without)] = np.inf
        return smallest(token_s)

    def load(self, now_s: float) -> Floats:
        """Return each pod's load divided by its weight: prompt tokens still to be prefilled; requests decide between
        equals."""
        columns = self.columns
        load: Floats = (self.uncached(now_s) + columns.in_flight * 1e-6) / columns.weight
        return load

    def uncached(self, now_s: float) -> Floats:
        """Return the prompt tokens of each pod's requests that are still to be prefilled; do not change the array."""
        columns = self.columns
        uncached = columns.own_uncached
        if self.table.is_any_behind(now_s):
            behind = (columns.others_until_s > now_s).nonzero()[0]
            drained = (columns.others_until_s[behind] - now_s) / columns.others_span_s[behind]
            uncached = uncached.copy()
            uncached[behind] += np.rint(columns.others_uncached[behind] * drained)
        return uncached


@dataclass(frozen=True, slots=True)
class Speeds:
    """The constants that pods count with: the median pod's, or their own if they are far from the median."""

    median: StepCost
    median_row: int
    """Row of the median pod."""
    apart: tuple[int, ...]
    """Rows of pods that count as the median pod, although one of the two has the fixed part of a step in `base_s`, and
    the other has it in the overhead. Such a pod counts with the median pod's overhead, too."""
    unlike: tuple[int, ...]
    """Rows of the pods that count with their own constants."""
    token_s: float | Floats
    base_s: float | Floats
    attention_s: float | Floats
    sequence_s: float | Floats
    context_s: float | Floats
    """A number if all pods count as the median pod; otherwise a number for each pod."""
    own_share: Floats | None
    """For each pod: the seconds per token that decisions use, divided by the pod's own learnt seconds per token. None:
    they are equal on every pod."""


def smallest(numbers: Floats) -> float:
    """Return the least number. For a few numbers, this takes a quarter of the time of numpy's `min`."""
    return float(numbers[numbers.argmin()])


def largest(numbers: Floats) -> float:
    """Return the greatest number. For a few numbers, this takes a quarter of the time of numpy's `max`."""
    return float(numbers[numbers.argmax()])


def number_at(numbers: Seconds, row: int) -> float:
    """Return a pod's number."""
    return numbers if isinstance(numbers, float) else float(numbers[row])


class TablePod(Protocol):
    """The state of a pod, from which its row is made: `router.views.pod_state.PodState`."""

    @property
    def cost(self) -> StepCost:
        """Return the pod's constants; never all zero (a prior stands in until something is known)."""
        ...

    @property
    def fetch_costs(self) -> FetchCosts:
        """Return what fetching from the pod's tiers costs, as it last reported."""
        ...

    def row(self, now_s: float) -> PodRow[float]:
        """Return the pod's numbers before the clock is applied to them."""
        ...

    def watch(self, changed: set[Any]) -> None:
        """Add this pod to `changed` whenever its row changes other than by the passing of time."""
        ...

    def unwatch(self, changed: set[Any]) -> None:
        """Stop adding this pod to `changed`."""
        ...


class PodTable:
    """The rows of some pods, in order of pod id."""

    def __init__(self, pods: Iterable[tuple[PodId, TablePod]], *, is_kept: bool = True) -> None:
        """`is_kept`: the table follows the pods until `close`; otherwise it is for one decision."""
        listed = tuple(pods)
        self.ids: tuple[PodId, ...] = tuple(pod_id for pod_id, _ in listed)
        self.costs: list[StepCost] = [state.cost for _, state in listed]
        self.id_set = frozenset(self.ids)
        self._states = tuple(state for _, state in listed)
        self._row_of = {pod_id: i for i, pod_id in enumerate(self.ids)}
        self._row_of_state = {state: i for i, state in enumerate(self._states)}
        self._cells = np.zeros((len(listed), _COLUMNS), order="F")
        """One column for each field of `PodRow`."""
        self._columns: PodRow[Floats] = PodRow(*(self._cells[:, i] for i in range(_COLUMNS)))
        self._changed: set[TablePod] = set(self._states)
        self.free_tokens: Floats = np.full(len(listed), np.inf)
        """`CandidatePods.room`, by `set_free_tokens`."""
        self._valid_until_s = 0.0
        """Until then no row has to be rebuilt, unless its pod changes."""
        self._late_from_s = math.inf
        """No pod is late before this."""
        self._behind_until_s = -math.inf
        """No pod is behind with other gateways' requests after this."""
        self._known: list[tuple[float, int]] = []
        """Pods of known speed in the order of their speed: (`unit_s`, row)."""
        self._units_s: list[float | None] = [None] * len(listed)
        self._fixed = {row for row, cost in enumerate(self.costs) if has_fixed(cost)}
        """Rows of the pods with the fixed part of a step in their constants."""
        self._sharing: set[int] = set()
        """Rows of the pods that say what fetching from a shared tier costs."""
        self._speeds: dict[float, Speeds] = {}
        self._sets: dict[int, tuple[Collection[PodId], Ints]] = {}
        for state in self._states if is_kept else ():
            state.watch(self._changed)

    def close(self) -> None:
        """Make the pods forget the table."""
        for state in self._states:
            state.unwatch(self._changed)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, pods: Collection[PodId]) -> Ints:
        """Return the rows of those `pods` that are in the table. Fast if the same unchanged object was given before."""
        found = self._sets.get(id(pods))
        if found is not None and found[0] is pods:
            return found[1]
        if len(self._sets) >= _SETS_REMEMBERED:
            self._sets.clear()
        rows = np.array([row for pod in pods if (row := self._row_of.get(pod)) is not None], dtype=np.intp)
        self._sets[id(pods)] = (pods, rows)
        return rows

    def row(self, pod_id: PodId) -> int | None:
        """Return the row of a pod; None if it is not in the table."""
        return self._row_of.get(pod_id)

    def fetch_costs(self, row: int) -> FetchCosts:
        """Return what fetching from its tiers costs the pod in `row`."""
        return self._states[row].fetch_costs

    def set_free_tokens(self, pod_id: PodId, tokens: float) -> None:
        """Set the tokens that the pod can take before it evicts something. Ignored for a pod not in the table."""
        if (row := self._row_of.get(pod_id)) is not None:
            self.free_tokens[row] = tokens

    def at(self, now_s: float) -> CandidatePods:
        """Return the pods as of now, with no match yet."""
        if self._changed:
            for state in self._changed:
                self._renew(self._row_of_state[state], now_s)
            self._changed.clear()
        if now_s >= self._valid_until_s:
            for row in (self._columns.valid_until_s <= now_s).nonzero()[0].tolist():
                self._renew(row, now_s)
            self._valid_until_s = smallest(self._columns.valid_until_s)
        return CandidatePods(self, self._columns)

    def is_any_late(self, now_s: float) -> bool:
        """Return whether a first token is late on any pod."""
        if self._late_from_s < now_s:
            self._late_from_s = smallest(self._columns.due_s)
        return self._late_from_s < now_s

    def is_any_behind(self, now_s: float) -> bool:
        """Return whether any pod has prefill of other gateways' requests before it."""
        if self._behind_until_s > now_s:
            self._behind_until_s = largest(self._columns.others_until_s)
        return self._behind_until_s > now_s

    @property
    def has_shared_tier(self) -> bool:
        """Whether any pod says what fetching from a shared tier costs."""
        return bool(self._sharing)

    def speeds(self, same_speed: float) -> Speeds:
        """Return the constants that each pod counts with, by the rows of the last `at`. A pod within `same_speed` of
        the median counts with the median's."""
        found = self._speeds.get(same_speed)
        if found is None:
            found = self._speeds[same_speed] = self._reckon_speeds(same_speed)
        return found

    def _renew(self, row: int, now_s: float) -> None:
        state = self._states[row]
        made = state.row(now_s)
        self._cells[row] = made  # one at a time: several at once are slower, because each row is unpacked first
        self._valid_until_s = min(self._valid_until_s, made.valid_until_s)
        self._late_from_s = min(self._late_from_s, made.due_s)
        self._behind_until_s = max(self._behind_until_s, made.others_until_s)
        if made.shared_token_s:
            self._sharing.add(row)
        elif self._sharing:
            self._sharing.discard(row)
        cost = state.cost
        if cost is not self.costs[row] or made.is_prior is not (self._units_s[row] is None):
            self._place(row, cost, None if made.is_prior else unit_s(cost))

    def _place(self, row: int, cost: StepCost, unit: float | None) -> None:
        """Set the constants of the pod in `row`, and its speed `unit` if it is known."""
        before = self._units_s[row]
        if before is not None:
            del self._known[bisect_left(self._known, (before, row))]
        if unit is not None:
            insort(self._known, (unit, row))
        self.costs[row], self._units_s[row] = cost, unit
        (self._fixed.add if has_fixed(cost) else self._fixed.discard)(row)
        self._speeds.clear()

    def _reckon_speeds(self, same_speed: float) -> Speeds:
        known = self._known
        if known:
            middle = known[len(known) // 2][1]
        else:
            middle = sorted(range(len(self.ids)), key=lambda row: unit_s(self.costs[row]))[len(self.ids) // 2]
        median = self.costs[middle]
        median_s = unit_s(median)
        low = bisect_left(known, (median_s / (1 + same_speed), -1))
        high = bisect_right(known, (median_s * (1 + same_speed), len(self.ids)))
        unlike = tuple(row for _, row in (*known[:low], *known[high:]))

        apart = self._fixed
        if has_fixed(median):
            apart = set(range(len(self.ids))) - apart if len(apart) < len(self.ids) else set()

        def part(name: str) -> float | Floats:
            shared: float = getattr(median, name)
            if not unlike:
                return shared
            each = np.full(len(self.ids), shared)
            each[list(unlike)] = [getattr(self.costs[row], name) for row in unlike]
            return each

        token_s, own_token_s = part("token_s"), self._columns.token_s
        return Speeds(
            median,
            middle,
            tuple(apart.difference(unlike)),
            unlike,
            token_s,
            part("base_s"),
            part("attention_s"),
            part("sequence_s"),
            part("context_s"),
            None if (own_token_s == token_s).all() else token_s / own_token_s,
        )


class Policy(Protocol):
    """A routing policy. It owns any state it keeps (a counter, traffic shares), reads no clock and does no I/O."""

    name: str

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """Return the pod for the request. `pods` is never empty and in order of pod id.

        The answer depends only on the arguments and the requests seen before. With `explain` the call must leave the
        policy's state as it was, and the decision has every pod's score.
        """
        ...
