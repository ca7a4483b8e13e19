"""`make policy-table`: play every cell, check the bounds, write the table. Exit status 1 if a bound is missed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import Field, field_validator
from rich.console import Console
from rich.progress import Progress

from engine.common.settings import Settings, load_or_exit
from engine.common.signals import EXIT_INTERRUPTED
from loadgen.simulate.arms import ARM_NAMES
from loadgen.workloads.files import DatasetError
from tests.bench.policy_table.bounds import Bound, check
from tests.bench.policy_table.cases import FOREIGN_GROUP, KNEES, SYNTHETIC, Case, knee_owners, trace_cases
from tests.bench.policy_table.files import bound_lines, load, markdown, save
from tests.bench.policy_table.run import Cell, find_knee, run_cell

FILE = "policies.json"
_END_S = 5.0
"""Seconds after which a killed process is gone."""


class StudySettings(Settings):
    """Flags, `WARMROUTE_*` environment and YAML keys of the policy table."""

    config: str | None = Field(None, description="YAML file with any of these settings")
    out: str = Field("out/sim", description="folder for policies.json and policies.md")
    seeds: int = Field(5, ge=1, le=10, description="runs of each cell, with seeds 1, 2, ..")
    arms: list[str] = Field(list(ARM_NAMES), description="routers to run, comma-separated")
    cases: list[str] = Field(
        default_factory=list,
        description="cases to run, comma-separated; foreign: all whose names begin with it; none: all",
    )
    traces: str | None = Field(
        None, description="folder with conversation_trace.jsonl and synthetic_trace.jsonl (Mooncake's, .gz too)"
    )
    sessions: int = Field(0, ge=0, description="sessions of each run, for a quick look; 0: as many as the case has")
    share_delay: float = Field(
        1.0,
        ge=0,
        le=100,
        description="how late gateways in front of pods that publish nothing hear of each other, as a factor of what"
        " was measured; give such a run its own --out",
    )
    find_knees: bool = Field(False, description="measure the knees first (an hour) instead of taking the recorded ones")
    merge: bool = Field(
        False,
        description="keep the knees of an earlier policies.json of the same --sessions, and its numbers for arms and"
        " cases that do not run now; without it, a file with other cases, arms or seeds is not overwritten",
    )
    processes: int = Field(0, ge=0, le=256, description="runs at the same time; 0: as many as there are cores")

    @field_validator("arms")
    @classmethod
    def _check_arms(cls, arms: list[str]) -> list[str]:
        unknown = [arm for arm in arms if arm not in ARM_NAMES]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: unknown; known are {', '.join(ARM_NAMES)}")
        return arms


def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    settings = load_or_exit(StudySettings, argv, "python -m tests.bench.policy_table")
    screen = Console(stderr=True)
    try:
        traced = trace_cases(Path(settings.traces)) if settings.traces else ()
    except ValueError as error:
        screen.print(f"--traces: {error}", markup=False)
        return 2
    known = [
        replace(case, requests=settings.sessions or case.requests, share_delay=settings.share_delay)
        for case in (*SYNTHETIC, *traced)
    ]
    wanted = {name: [case for case in known if _is_called(case, name)] for name in settings.cases}
    unknown = {name for name, found in wanted.items() if not found}
    if unknown:
        screen.print(f"--cases: {', '.join(sorted(unknown))} unknown; known are {', '.join(c.name for c in known)}")
        return 2
    if not settings.traces:
        screen.print("without --traces the cases of the Mooncake traces are left out", highlight=False)
    cases = [case for case in known if not settings.cases or any(case in found for found in wanted.values())]
    path = Path(settings.out) / FILE
    table: dict[str, dict[str, list[Cell]]] = {}
    knees: dict[str, float] = {}
    shown: list[Case] = []
    try:
        old, knees = earlier(settings, cases, path)
        owners = knee_owners({case.knee_of for case in cases} - knees.keys() - {""}, known)
        for new in play(cases, owners, settings, knees, screen):
            # Known cases come first, in their order, then those of an earlier run with --traces.
            names = dict.fromkeys([*(case.name for case in known), *old])
            table = {name: {**old.get(name, {}), **new.get(name, {})} for name in names if name in old or name in new}
            shown = [case for case in known if case.name in table]
            save(table, knees, settings.sessions, list(check(table, shown)), path)
    except KeyboardInterrupt:
        screen.print(f"stopped; {path} has the seeds that were complete" if shown else "stopped; nothing was written")
        return EXIT_INTERRUPTED
    except DatasetError as error:
        screen.print(f"--traces: {error}", markup=False)
        return 2
    except (OSError, ValueError) as error:
        screen.print(f"--out, --merge: {error}", markup=False)
        return 2
    return report(table, list(check(table, shown)), shown, path)


def _is_called(case: Case, name: str) -> bool:
    """Return whether `name` means this case, or its group `foreign`."""
    return case.name == name or (name == FOREIGN_GROUP and case.name.startswith(f"{name}_"))


def earlier(
    settings: StudySettings, cases: Sequence[Case], path: Path
) -> tuple[dict[str, dict[str, list[Cell]]], dict[str, float]]:
    """Return the cells and knees with which this run begins. Raises OSError, and ValueError if the run would lose cells
    of an earlier one, or mix them with cells of another size.
    """
    fresh = {} if settings.find_knees else dict(KNEES)
    if not settings.merge and not path.exists():
        return {}, fresh
    old, knees, sessions = load(path)
    if sessions != settings.sessions:
        raise ValueError(
            f"{path} holds runs of {_counted(sessions)}, --sessions {settings.sessions} asks for"
            f" {_counted(settings.sessions)}: give the same --sessions, or another --out"
        )
    if settings.merge:
        return old, knees
    played = {case.name for case in cases}
    lost = [
        f"{arm} on {name}"
        for name, arms in old.items()
        for arm, cells in arms.items()
        if name not in played or arm not in settings.arms or len(cells) > settings.seeds
    ]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise ValueError(
            f"{path} holds runs that this one does not repeat, such as {', '.join(lost[:3])}{more}: --merge keeps them,"
            " another --out leaves the file as it is"
        )
    return {}, fresh


def _counted(sessions: int) -> str:
    return f"{sessions} sessions" if sessions else "as many sessions as each case has"


def play(
    cases: Sequence[Case],
    owners: Mapping[str, Case],
    settings: StudySettings,
    knees: dict[str, float],
    screen: Console,
) -> Iterator[dict[str, dict[str, list[Cell]]]]:
    """Yield all cells so far, after each seed. First measure the knees of `owners` and add them to `knees`."""
    todo = [(case, arm) for case in cases for arm in settings.arms]
    table: dict[str, dict[str, list[Cell]]] = {}
    pool = ProcessPoolExecutor(settings.processes or os.cpu_count())
    try:
        with Progress(console=screen) as bar:
            finding = bar.add_task("knees", total=len(owners))
            with _uninterrupted():
                found = {pool.submit(find_knee, case): name for name, case in owners.items()}
            for future in as_completed(found):
                knees[found[future]] = future.result()
                bar.advance(finding)
            playing = bar.add_task("runs", total=len(todo) * settings.seeds)
            for seed in range(1, settings.seeds + 1):
                with _uninterrupted():
                    runs = [pool.submit(run_cell, case, arm, seed, knees.get(case.knee_of, 1.0)) for case, arm in todo]
                for _ in as_completed(runs):
                    bar.advance(playing)
                for (case, arm), run in zip(todo, runs, strict=True):
                    table.setdefault(case.name, {}).setdefault(arm, []).append(run.result())
                yield table
    except BaseException:
        # A run takes minutes, and its result is no longer needed. Do not wait for the pool: in Python 3.11 it may never
        # notice that its processes are gone.
        workers = multiprocessing.active_children()
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_END_S)
        raise
    pool.shutdown()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C: if it interrupted the start of a process, the pool would not know the process or end it."""
    met: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: met.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if met:
        raise KeyboardInterrupt


def report(
    table: dict[str, dict[str, list[Cell]]],
    bounds: Sequence[Bound],
    cases: Sequence[Case],
    path: Path,
) -> int:
    """Write the Markdown and print it; return 1 if a bound is missed."""
    text = "\n".join(markdown(table, cases))
    path.with_suffix(".md").write_text(text + "\n")
    lines = list(bound_lines(bounds))
    print(text, *lines, sep="\n")
    missed = sum(not bound.kept for bound in bounds)
    print(f"{len(bounds) - missed} of {len(bounds)} bounds kept; {path}, {path.with_suffix('.md')}")
    return 1 if missed else 0


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    if exit_status == EXIT_INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)  # a normal exit would wait for the pool
    sys.exit(exit_status)
