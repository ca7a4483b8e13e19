"""The pods of a large fleet as columns of numbers, kept current, so that a decision looks at all of them at once.

`PodState.view` takes a microsecond or two for each pod, and a policy's loop as much again: at a thousand pods that is
8 ms a decision. Here a pod's row is made anew only when something happened to the pod, and what drains with the clock
is reckoned for all rows by numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.contract.fetch_costs import FetchCosts
from engine.contract.load import StepCost
from router.routing.latency import told_s, unit_s
from router.routing.pick import by_hash
from router.routing.pod_state import PodState
from router.routing.row import PodRow
from router.routing.types import Decision, PodId, RequestInfo

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
_SETS_REMEMBERED = 1024
_COLUMNS = len(PodRow._fields)


@dataclass(frozen=True, slots=True)
class WideTiers:
    """What pods hold of the prompt below their pools: tokens of each, and seconds to fetch these as the pods tell them,
    0 where one does not."""

    host: Floats
    disk: Floats
    host_s: Floats
    disk_s: Floats


@dataclass(slots=True)
class WidePods:
    """The pods that may serve a request, at the moment of the decision: what a list of `PodView` is for few pods."""

    table: PodTable
    columns: PodRow[Floats]
    matched: Floats | None = None
    """As `PodView.matched_tokens`, for each pod; None: none holds anything."""
    longest: int = 0
    """The most of these."""
    tiers: WideTiers | None = None
    """None: no pod holds anything below its pool."""
    room: Floats | None = None
    """As `PodView.room_tokens`; None: it does not count."""

    def hold(self, rows: Ints, tokens: int) -> None:
        """The pods in `rows` hold `tokens` of the prompt; said of fewer pods with more tokens later, that counts."""
        if self.matched is None:
            self.matched = np.zeros(len(self.table))
        self.matched[rows] = tokens
        self.longest = max(self.longest, tokens if len(rows) else 0)

    def fetch(self, row: int, host_tokens: int, disk_tokens: int) -> None:
        """Of what the pod in `row` holds, so much is in host memory and on disk."""
        if self.tiers is None:
            self.tiers = WideTiers(*np.zeros((4, len(self.table))))
        tiers, costs = self.tiers, self.table.fetch_costs(row)
        tiers.host[row], tiers.disk[row] = host_tokens, disk_tokens
        tiers.host_s[row] = told_s(host_tokens, costs.host)
        tiers.disk_s[row] = told_s(disk_tokens, costs.disk)

    def matched_by(self, row: int) -> int:
        """Prompt tokens that the pod in `row` holds."""
        return 0 if self.matched is None else int(self.matched[row])

    def lowest(self, request: RequestInfo, scores: Floats) -> int:
        """As `pick.lowest`."""
        tied = (scores == scores.min()).nonzero()[0]
        return int(tied[0]) if len(tied) == 1 else self.spread(request, tied)

    def decision(self, policy: str, row: int) -> Decision:
        """For the pod in `row`, by a policy that predicts no time."""
        return Decision(row, policy, self.matched_by(row), None)

    def spread(self, request: RequestInfo, rows: Ints) -> int:
        """One of several equal pods, as `pick.lowest` has it."""
        ids = self.table.ids
        return by_hash(request, [(ids[row], row) for row in rows.tolist()])

    def free_at_s(self, now_s: float) -> Floats:
        """As `PodView.prefill_free_at_s`."""
        columns = self.columns
        free_s = columns.free_at_s
        late = (columns.due_s < now_s).nonzero()[0]
        if len(late):
            free_s = free_s.copy()
            again_s = 2 * now_s - columns.due_s[late] + columns.late_step_s[late]
            free_s[late] = np.maximum(free_s[late], again_s)
        behind = (columns.others_until_s > now_s).nonzero()[0]
        if len(behind):
            others_s = columns.others_trust[behind] * (columns.others_until_s[behind] - now_s)
            free_s = free_s.copy()
            free_s[behind] = np.maximum(free_s[behind], now_s) + others_s
        return free_s

    def least_token_s(self, without: Collection[PodId]) -> float:
        """Seconds of prefill of a token on the fastest pod that is not among `without`."""
        token_s = self.columns.token_s.copy()
        token_s[self.table.rows(without)] = np.inf
        return float(token_s.min())

    def load(self, now_s: float) -> Floats:
        """As `pick.load`."""
        columns = self.columns
        uncached = columns.own_uncached
        behind = (columns.others_until_s > now_s).nonzero()[0]
        if len(behind):
            drained = (columns.others_until_s[behind] - now_s) / columns.others_span_s[behind]
            uncached = uncached.copy()
            uncached[behind] += np.rint(columns.others_uncached[behind] * drained)
        load: Floats = (uncached + columns.in_flight * 1e-6) / columns.weight
        return load


@dataclass(frozen=True, slots=True)
class Speeds:
    """What pods count as: the median pod's constants, or those of a pod that is far from it."""

    median: StepCost
    unlike: tuple[int, ...]
    """Rows of the pods with constants of their own."""
    token_s: float | Floats
    base_s: float | Floats
    attention_s: float | Floats
    sequence_s: float | Floats
    context_s: float | Floats
    """Numbers where all pods count as the median one; else one for each pod."""
    own_share: Floats
    """For each pod, what it counts as / its own learnt seconds a token."""


class PodTable:
    """The rows of some pods, in order of pod id. `close` when it is of no more use."""

    def __init__(self, pods: Iterable[tuple[PodId, PodState]]) -> None:
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
        self._changed: set[PodState] = set(self._states)
        self.room: Floats = np.full(len(listed), np.inf)
        """As `PodView.room_tokens`, as `set_room` has it."""
        self._valid_until_s = 0.0
        """No row has to be made anew before, unless its pod changes."""
        self._known: list[tuple[float, int]] = []
        """Pods of known speed in the order of their speed: (`unit_s`, row)."""
        self._units_s: list[float | None] = [None] * len(listed)
        self._speeds: dict[float, Speeds] = {}
        self._sets: dict[int, tuple[Collection[PodId], Ints]] = {}
        for state in self._states:
            state.watch(self._changed)

    def close(self) -> None:
        """Have the pods forget the table."""
        for state in self._states:
            state.unwatch(self._changed)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, pods: Collection[PodId]) -> Ints:
        """The rows of `pods`, without those that are not here. Fast for an object given before, unchanged."""
        found = self._sets.get(id(pods))
        if found is not None and found[0] is pods:
            return found[1]
        if len(self._sets) >= _SETS_REMEMBERED:
            self._sets.clear()
        rows = np.array([row for pod in pods if (row := self._row_of.get(pod)) is not None], dtype=np.intp)
        self._sets[id(pods)] = (pods, rows)
        return rows

    def row(self, pod_id: PodId) -> int | None:
        """The row of a pod, if it is here."""
        return self._row_of.get(pod_id)

    def fetch_costs(self, row: int) -> FetchCosts:
        """What fetching from its tiers takes the pod in `row`."""
        return self._states[row].fetch_costs

    def set_room(self, pod_id: PodId, tokens: float) -> None:
        """So many tokens the pod can take before it evicts something. Others' pods are passed over."""
        if (row := self._row_of.get(pod_id)) is not None:
            self.room[row] = tokens

    def at(self, now_s: float) -> WidePods:
        """The pods as of now, holding nothing."""
        if self._changed:
            for state in self._changed:
                self._renew(self._row_of_state[state], now_s)
            self._changed.clear()
        if now_s >= self._valid_until_s:
            for row in np.flatnonzero(self._columns.valid_until_s <= now_s).tolist():
                self._renew(row, now_s)
            self._valid_until_s = float(self._columns.valid_until_s.min())
        return WidePods(self, self._columns)

    def speeds(self, same_speed: float) -> Speeds:
        """What each pod counts as, by the rows of the last `at`; one within `same_speed` of the median as that."""
        found = self._speeds.get(same_speed)
        if found is None:
            found = self._speeds[same_speed] = self._reckon_speeds(same_speed)
        return found

    def _renew(self, row: int, now_s: float) -> None:
        state = self._states[row]
        made = state.row(now_s)
        self._cells[row] = made  # one at a time: several at once are slower, as each has to be taken apart first
        if made.valid_until_s < self._valid_until_s:
            self._valid_until_s = made.valid_until_s
        cost = state.cost
        if cost is not self.costs[row] or made.is_prior is not (self._units_s[row] is None):
            self._place(row, cost, None if made.is_prior else unit_s(cost))

    def _place(self, row: int, cost: StepCost, unit: float | None) -> None:
        """The pod in `row` has those constants, and that speed if it is known."""
        before = self._units_s[row]
        if before is not None:
            del self._known[bisect_left(self._known, (before, row))]
        if unit is not None:
            insort(self._known, (unit, row))
        self.costs[row], self._units_s[row] = cost, unit
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

        def part(name: str) -> float | Floats:
            shared: float = getattr(median, name)
            if not unlike:
                return shared
            each = np.full(len(self.ids), shared)
            each[list(unlike)] = [getattr(self.costs[row], name) for row in unlike]
            return each

        token_s = part("token_s")
        return Speeds(
            median,
            unlike,
            token_s,
            part("base_s"),
            part("attention_s"),
            part("sequence_s"),
            part("context_s"),
            token_s / self._columns.token_s,
        )


class WidePolicy(ABC):
    """A policy that can look at many pods at once."""

    name: str

    @abstractmethod
    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """As `Policy.choose` decides with a view of each pod, and as it changes the policy's state."""
