"""What each part of a policy is worth: the eight deciding cases without the part, against the whole policy.

    python -m tests.bench.policy_table.ablation [--changes stall_s,..] [--traces FOLDER] [--out out/ablation]

A part is a term, a rule for ties, or a part of one. Ratios of mean and p99 TTFT are paired by seed, with 95 % intervals
(Student's t of the logarithms). A part stays only if some case without it is worse by more than 2 %, with an interval
that excludes 1. Runs are kept in `<out>.json` and not repeated; delete the file after a change of the policy. With
`--until-decided`, a part's other cases are left out once one case has decided for it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from tests.bench.policy_table.bounds import T_95
from tests.bench.policy_table.changes import CHANGES, Change
from tests.bench.policy_table.deciders import Decider, deciders
from tests.bench.policy_table.run import Cell

WORSE = 1.02
"""A part stays if some case is worse without it by more than this ..."""
FIELDS = ("mean_ttft_ms", "p99_ttft_ms")
Cells = dict[str, dict[str, dict[int, Cell]]]
"""Change -> case -> seed -> cell; the whole policy stands under `whole` and its name."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A change against the whole policy, and its 95 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def decides(self) -> bool:
        """Whether the part stays."""
        return self.ratio > WORSE and self.low > 1

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired(changed: Sequence[float], whole: Sequence[float]) -> Ratio:
    """Return the ratio of numbers with equal seeds."""
    logs = [math.log(one / other) for one, other in zip(changed, whole, strict=True)]
    middle = statistics.fmean(logs)
    half = T_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def ratios(cells: Cells, change: Change, case: str) -> dict[str, Ratio] | None:
    """Return the ratio of each of `FIELDS` over all seeds played with both; None for less than two."""
    changed, whole = cells.get(change.name, {}).get(case, {}), cells.get(f"whole {change.arm}", {}).get(case, {})
    seeds = sorted(changed.keys() & whole.keys())
    if len(seeds) < 2:
        return None
    return {
        field: paired(
            [getattr(changed[seed], field) for seed in seeds], [getattr(whole[seed], field) for seed in seeds]
        )
        for field in FIELDS
    }


_PLAYED: list[tuple[Change, Decider]] = []
"""What the processes play. They inherit it: functions of a change cannot be sent to them."""


def run_one(seed: int) -> Cell:
    """Play one case with a change, in a process of its own: the change stays in force until the process ends."""
    change, decider = _PLAYED[-1]
    change.apply()
    return decider.run(change.arm, seed)


class Runs:
    """All runs so far, on disk."""

    def __init__(self, path: Path, seeds: int, processes: int) -> None:
        self.path = path
        self.seeds = seeds
        self.processes = processes
        self.cells: Cells = {}
        if path.exists():
            for name, cases in json.loads(path.read_text()).items():
                self.cells[name] = {
                    case: {int(seed): Cell(**cell) for seed, cell in seeds.items()} for case, seeds in cases.items()
                }

    def play(self, name: str, change: Change, decider: Decider) -> None:
        """Play the missing seeds of a case."""
        have = self.cells.setdefault(name, {}).setdefault(decider.name, {})
        missing = [seed for seed in range(1, self.seeds + 1) if seed not in have]
        _PLAYED.append((change, decider))
        with get_context("fork").Pool(self.processes, maxtasksperchild=1) as pool:
            have.update(zip(missing, pool.imap(run_one, missing, chunksize=1), strict=True))
        self._save()

    def _save(self) -> None:
        stored = {
            name: {case: {seed: asdict(cell) for seed, cell in seeds.items()} for case, seeds in cases.items()}
            for name, cases in self.cells.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(stored) + "\n")


def play(runs: Runs, change: Change, cases: Mapping[str, Decider], *, until_decided: bool) -> Iterator[str]:
    """Play a change and yield a line for each case."""
    whole = Change(f"whole {change.arm}", "", arm=change.arm)
    for case in change.cases or cases:
        if case not in cases:
            continue
        runs.play(whole.name, whole, cases[case])
        runs.play(change.name, change, cases[case])
        found = ratios(runs.cells, change, case)
        assert found is not None
        marks = " STAYS" if any(ratio.decides for ratio in found.values()) else ""
        yield f"{change.name:34} {case:9} " + "  ".join(f"{field} {ratio}" for field, ratio in found.items()) + marks
        if marks and until_decided:
            return


def markdown(cells: Cells, changes: Sequence[Change], cases: Sequence[str]) -> Iterator[str]:
    """Yield one line a change: the case that speaks most for the part, in the mean and in the p99."""
    yield "| without | cases | mean TTFT at most | p99 TTFT at most | |"
    yield "|---|---|---|---|---|"
    for change in changes:
        found = {case: ratio for case in cases if (ratio := ratios(cells, change, case)) is not None}
        if not found:
            continue
        worst = [max(found, key=lambda case: _weight(found[case][field])) for field in FIELDS]
        shown = [f"{case} {found[case][field]}" for case, field in zip(worst, FIELDS, strict=True)]
        stays = any(ratio.decides for of_case in found.values() for ratio in of_case.values())
        yield f"| {change.about} | {len(found)} | {' | '.join(shown)} | {'stays' if stays else 'falls'} |"


def _weight(ratio: Ratio) -> tuple[bool, float]:
    return ratio.decides, ratio.ratio


def main(argv: Sequence[str]) -> int:
    """Play and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", default="", help="changes to play, comma-separated; none: all")
    parser.add_argument("--cases", default="", help="cases to play, comma-separated; none: those of each change")
    parser.add_argument("--traces", type=Path, help="folder with Mooncake's conversation_trace.jsonl, or .gz")
    parser.add_argument("--out", type=Path, default=Path("out/ablation"), help="<out>.json and <out>.md are written")
    parser.add_argument("--seeds", type=int, choices=range(5, 11), default=5, help="runs of a case, seeds 1, 2, ..")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--until-decided", action="store_true", help="leave out cases once a part is known to stay")
    settings = parser.parse_args(argv)
    wanted = [name for name in settings.changes.split(",") if name]
    if unknown := set(wanted) - {change.name for change in CHANGES}:
        parser.error(f"unknown changes: {', '.join(sorted(unknown))}")
    cases = {decider.name: decider for decider in deciders(settings.traces)}
    if only := [name for name in settings.cases.split(",") if name]:
        cases = {name: cases[name] for name in only}
    runs = Runs(settings.out.with_suffix(".json"), settings.seeds, settings.processes)
    changes = [change for change in CHANGES if not wanted or change.name in wanted]
    for change in changes:
        for line in play(runs, change, cases, until_decided=settings.until_decided):
            print(line, flush=True)
    table = "\n".join(markdown(runs.cells, changes, list(cases)))
    settings.out.with_suffix(".md").write_text(table + "\n")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
