"""The bounds of the table; each tells by how much it is kept or missed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadgen.experiment.verdict import FAILED_MORE
from loadgen.simulate.arms import PEERS
from tests.bench.policy_table.cases import NOTHING_SHARED, ONE_PROMPT, Case
from tests.bench.policy_table.earlier import EARLIER, EARLIER_REQUESTS
from tests.bench.policy_table.run import WARM_REQUESTS, Cell

Table = Mapping[str, Mapping[str, Sequence[Cell]]]
"""Case -> arm -> one cell per seed."""

OURS = "predicted_ttft"
MEDIAN_GAIN = 0.15
P99_SLACK = 1.05
NOTHING_SHARED_SLACK = 1.01
FLOOR_SLACK = 1.05
GROUP_HIT_SLACK = 0.03
GROUP_BALANCE = 1.15
ONE_PROMPT_SLACK = 1.0
GATEWAYS_HIT_SLACK = 0.02
GATEWAYS_TTFT_SLACK = 1.05
ONE_PROMPT_GROUP_SLACK = 1.03
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Two-sided 95 % quantile of Student's t by number of seeds."""
_ONE_PROMPT_NAMES = frozenset(case.name for case in ONE_PROMPT)


@dataclass(frozen=True, slots=True)
class Bound:
    """One check."""

    name: str
    value: float
    limit: float
    detail: str

    @property
    def kept(self) -> bool:
        """Return whether the value is within the limit."""
        return self.value <= self.limit


def mean(cells: Sequence[Cell], field: str) -> float:
    """Return the mean over the seeds."""
    return statistics.fmean(getattr(cell, field) for cell in cells)


def half_width(numbers: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean. Raises ValueError for fewer than two numbers."""
    if len(numbers) < 2:
        raise ValueError("an interval needs at least two numbers")
    return T_95.get(len(numbers), 2.0) * statistics.stdev(numbers) / math.sqrt(len(numbers))


def same_seeds(arms: Mapping[str, Sequence[Cell]], names: Iterable[str]) -> dict[str, Sequence[Cell]]:
    """Return the arms of `names` that exist, each cut to the seeds that all of them have.

    Requests differ from seed to seed, so only equal seeds may be compared.
    """
    there = {name: arms[name] for name in names if name in arms}
    seeds = min(map(len, there.values()), default=0)
    return {name: cells[:seeds] for name, cells in there.items()}


def check(table: Table, cases: Sequence[Case]) -> Iterator[Bound]:
    """Yield every bound for which there are numbers."""
    ratios = []
    for case in cases:
        arms = table.get(case.name, {})
        if OURS not in arms:
            continue
        peers = same_seeds(arms, (OURS, *PEERS))
        ours = peers.pop(OURS)
        if case.name in NOTHING_SHARED:
            yield from _nothing_shared(case, arms)
        elif case.name in _ONE_PROMPT_NAMES:
            yield from _one_prompt(case, arms)
        elif case.kv_tokens:
            yield from _against_one_gateway(case, table)
        elif peers:
            yield from _against_peers(case, ours, peers)
            ratios.append(mean(ours, "mean_ttft_ms") / best(peers, "mean_ttft_ms")[1])
        if peers:
            yield _failures(case, ours, peers)
        if case.gateways == 1 and "omniscient" in arms and not _is_short(arms[OURS]):
            yield _against_floor(case, arms)
        yield from _groups(case, arms)
    if ratios:
        yield Bound(
            "median over the cases: mean TTFT / best peer's",
            statistics.median(ratios),
            1 - MEDIAN_GAIN,
            f"from {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} cases",
        )


def _against_peers(case: Case, ours: Sequence[Cell], peers: Mapping[str, Sequence[Cell]]) -> list[Bound]:
    bounds = []
    for field, slack in (("mean_ttft_ms", 1.0), ("p99_ttft_ms", P99_SLACK)):
        peer, theirs = best(peers, field)
        value = mean(ours, field)
        label = "mean" if field.startswith("mean") else "p99"
        detail = f"{value:,.1f} ms; best peer {peer} {theirs:,.1f} ms"
        bounds.append(Bound(f"{case.name}: {label} TTFT / best peer's", value / theirs, slack, detail))
    return bounds


def _failures(case: Case, ours: Sequence[Cell], peers: Mapping[str, Sequence[Cell]]) -> Bound:
    """Bound the failures: latencies are those of completed requests, so an arm could win by failing the others."""
    peer, _ = best(peers, "mean_ttft_ms")
    failed, theirs = _failed_share(ours), _failed_share(peers[peer])
    detail = f"{failed:.2%}; {peer}, which has the best mean, {theirs:.2%}"
    return Bound(f"{case.name}: failed requests more than the best peer's", failed - theirs, FAILED_MORE, detail)


def _failed_share(cells: Sequence[Cell]) -> float:
    return sum(cell.failed for cell in cells) / sum(cell.failed + cell.completed for cell in cells)


def _nothing_shared(case: Case, arms: Mapping[str, Sequence[Cell]]) -> Iterator[Bound]:
    baselines = same_seeds(arms, (OURS, "round_robin", "least_loaded"))
    ours = mean(baselines.pop(OURS), "mean_ttft_ms")
    if baselines:
        name, theirs = best(baselines, "mean_ttft_ms")
        detail = f"{ours:,.1f} ms; {name} {theirs:,.1f} ms"
        yield Bound(f"{case.name}: mean TTFT / best baseline's", ours / theirs, NOTHING_SHARED_SLACK, detail)


def _one_prompt(case: Case, arms: Mapping[str, Sequence[Cell]]) -> Iterator[Bound]:
    """Bound mean and p99 of `predicted_ttft` and `affinity_groups` by those of `round_robin`, and those of
    `predicted_ttft` also by their earlier values."""
    for field, label in (("mean_ttft_ms", "mean"), ("p99_ttft_ms", "p99")):
        for arm, slack in ((OURS, ONE_PROMPT_SLACK), ("affinity_groups", ONE_PROMPT_GROUP_SLACK)):
            both = same_seeds(arms, (arm, "round_robin"))
            if len(both) == 2:
                ours, robin = ([getattr(cell, field) for cell in cells] for cells in both.values())
                yield _paired(f"{case.name}: {arm}'s {label} TTFT / round_robin's", ours, robin, slack)
        before = EARLIER.get(case.name, {}).get(field, ())
        if before and case.requests == EARLIER_REQUESTS:
            ours = [getattr(cell, field) for cell in arms[OURS][: len(before)]]
            yield _paired(f"{case.name}: {label} TTFT / what it was", ours, before[: len(ours)], ONE_PROMPT_SLACK)


def _paired(name: str, ours: Sequence[float], theirs: Sequence[float], slack: float) -> Bound:
    """Bound the ratio of the means. It may exceed `slack` by the 95 % interval of the difference on equal seeds."""
    mean_theirs = statistics.fmean(theirs)
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    chance = half_width(differences) / mean_theirs if len(differences) > 1 else 0.0
    value = statistics.fmean(ours)
    detail = f"{value:,.1f} ms; {mean_theirs:,.1f} ms; chance {chance:.3f}"
    return Bound(name, value / mean_theirs, slack + chance, detail)


def _against_floor(case: Case, arms: Mapping[str, Sequence[Cell]]) -> Bound:
    field = "warm_mean_ttft_ms"
    ours, floor = (mean(cells, field) for cells in same_seeds(arms, (OURS, "omniscient")).values())
    detail = f"{ours:,.1f} ms; omniscient {floor:,.1f} ms, after the first 500 requests"
    return Bound(f"{case.name}: mean TTFT / omniscient's", ours / floor, FLOOR_SLACK, detail)


@dataclass(frozen=True, slots=True)
class AgainstOne:
    """Several gateways compared with one, on equal seeds."""

    one: Sequence[Cell]
    several: Sequence[Cell]

    @property
    def lag(self) -> float:
        """Return the decrease of reused tokens as a share of all prompt tokens."""
        return mean(self.one, "hit_rate") - mean(self.several, "hit_rate")

    def ratio(self, field: str) -> tuple[float, float]:
        """Return mean / mean, and half the width of its 95 % interval; NaN for a single seed."""
        theirs = mean(self.one, field)
        more = [getattr(cell, field) - getattr(one, field) for cell, one in zip(self.several, self.one, strict=True)]
        return 1 + statistics.fmean(more) / theirs, half_width(more) / theirs if len(more) > 1 else math.nan


def against_one(case: Case, table: Table) -> AgainstOne | None:
    """Compare the case's gateways with a single one; None if the case has only one, or if there is nothing to
    compare."""
    one = table.get(f"{case.name.rpartition('_')[0]}_1", {}).get(OURS, ())
    several = table.get(case.name, {}).get(OURS, ())
    seeds = min(len(one), len(several))
    if case.gateways == 1 or not case.kv_tokens or not seeds:
        return None
    return AgainstOne(one[:seeds], several[:seeds])


def _against_one_gateway(case: Case, table: Table) -> Iterator[Bound]:
    """For pods that publish nothing, bound several gateways' hit rate and mean TTFT by those of one gateway."""
    both = against_one(case, table)
    if both is None:
        return
    detail = f"{mean(both.several, 'hit_rate'):.3f}; one gateway {mean(both.one, 'hit_rate'):.3f}"
    yield Bound(f"{case.name}: hit rate below one gateway's", both.lag, GATEWAYS_HIT_SLACK, detail)
    ratio, chance = both.ratio("mean_ttft_ms")
    value, theirs = mean(both.several, "mean_ttft_ms"), mean(both.one, "mean_ttft_ms")
    detail = f"{value:,.1f} ms; one gateway {theirs:,.1f} ms; chance {chance:.3f}"
    yield Bound(f"{case.name}: mean TTFT / one gateway's", ratio, GATEWAYS_TTFT_SLACK, detail)


def _is_short(cells: Sequence[Cell]) -> bool:
    """Return whether the run is a quick look: no request comes after the first 500."""
    return any(math.isnan(cell.warm_mean_ttft_ms) and cell.completed + cell.failed <= WARM_REQUESTS for cell in cells)


def _groups(case: Case, arms: Mapping[str, Sequence[Cell]]) -> Iterator[Bound]:
    if "affinity_groups" not in arms or "prefix_hash" not in arms or case.name in NOTHING_SHARED:
        return
    both = same_seeds(arms, ("affinity_groups", "prefix_hash"))
    groups, hashed = (mean(cells, "hit_rate") for cells in both.values())
    detail = f"{groups:.3f}; prefix_hash {hashed:.3f}"
    yield Bound(f"{case.name}: affinity_groups' lag in hit rate", hashed - groups, GROUP_HIT_SLACK, detail)
    load = mean(arms["affinity_groups"], "max_over_mean_load")
    yield Bound(f"{case.name}: affinity_groups' max / mean load", load, GROUP_BALANCE, f"{load:.2f}")


def best(arms: Mapping[str, Sequence[Cell]], field: str) -> tuple[str, float]:
    """Return the arm with the lowest mean over the seeds, and that mean. An arm that completed nothing has no mean."""
    means = {arm: mean(cells, field) for arm, cells in arms.items()}
    name = min(means, key=lambda arm: math.inf if math.isnan(means[arm]) else means[arm])
    return name, means[name]
