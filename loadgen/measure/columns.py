"""The requests of one or more runs of an arm on one time line, as columns for summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loadgen.measure.gaps import GapHistogram
from loadgen.measure.records import Records

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Run(Protocol):
    """The input of a summary, such as `loadgen.load.player.ArmRun`."""

    @property
    def records(self) -> Records:
        """Return the records of every request that was sent."""
        ...

    @property
    def planned(self) -> int | None:
        """Return the number of requests in the schedule; None: as many as time allowed."""
        ...

    @property
    def duration_s(self) -> float:
        """Return the seconds from the run's start to the end of its last request."""
        ...


@dataclass(frozen=True, slots=True)
class Columns:
    """Row i is a request. Runs follow each other without a gap: times count from the first run's start."""

    completed: npt.NDArray[np.bool_]
    pod: Ints
    """Index into `pods`; -1: the pod of the request is not known."""
    intended_s: Floats
    sent_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    finished_s: Floats
    lag_s: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    has_usage: npt.NDArray[np.bool_]
    pods: tuple[str, ...]
    failures: dict[str, int]
    failure_details: dict[str, str]
    gaps: GapHistogram
    offered: int
    """Requests in the schedules, sent or not."""
    duration_s: float

    def __len__(self) -> int:
        return len(self.completed)

    @property
    def ttft_s(self) -> Floats:
        """Return the seconds from the intended send time to the first token; nan: no token came."""
        return self.first_token_s - self.intended_s

    @property
    def e2e_s(self) -> Floats:
        """Return the seconds from the intended send time to the end."""
        return self.finished_s - self.intended_s

    @property
    def tpot_s(self) -> Floats:
        """Return the seconds per output token after the first; nan for answers of fewer than two tokens. The end of the
        stream comes later than the last token and is no part of it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot = (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)
        return np.where(self.output_tokens >= 2, tpot, np.nan)


def columns_of(runs: Sequence[Run], pods: Sequence[str] = ()) -> Columns:
    """Return the columns of `runs`, one after another; `pods` come first, then pods that only the records name."""
    names = tuple(dict.fromkeys((*pods, *(pod for run in runs for pod in run.records.pods if pod))))
    starts_s = np.cumsum([0.0, *(_length_s(run) for run in runs)])
    gaps, failures = GapHistogram(), Counter[str]()
    for run in runs:
        gaps.merge(run.records.gaps)
        counts = np.bincount(run.records.failure, minlength=len(run.records.failures))
        failures.update({name: int(n) for name, n in zip(run.records.failures, counts, strict=True) if name and n})
    index = {pod: i for i, pod in enumerate(names)}

    def joined(name: str, *, is_time: bool = False) -> npt.NDArray[np.float64]:
        parts = [getattr(run.records, name) for run in runs]
        if is_time:
            parts = [part + start_s for part, start_s in zip(parts, starts_s, strict=False)]
        return np.concatenate([np.empty(0), *parts])

    pod_parts = [np.array([index.get(pod, -1) for pod in run.records.pods])[run.records.pod] for run in runs]
    return Columns(
        completed=joined("completed").astype(bool),
        pod=np.concatenate([np.empty(0, np.int64), *pod_parts]),
        intended_s=joined("intended_s", is_time=True),
        sent_s=joined("sent_s", is_time=True),
        first_token_s=joined("first_token_s", is_time=True),
        last_token_s=joined("last_token_s", is_time=True),
        finished_s=joined("finished_s", is_time=True),
        lag_s=joined("lag_s"),
        prompt_tokens=joined("prompt_tokens").astype(np.int64),
        cached_tokens=joined("cached_tokens").astype(np.int64),
        output_tokens=joined("output_tokens").astype(np.int64),
        has_usage=joined("has_usage").astype(bool),
        pods=names,
        failures=dict(sorted(failures.items())),
        failure_details={
            name: detail
            for run in reversed(runs)
            for name, detail in zip(run.records.failures, run.records.details, strict=True)
            if name and detail
        },
        gaps=gaps,
        offered=sum(max(run.planned or 0, len(run.records)) for run in runs),
        duration_s=float(starts_s[-1]),
    )


def _length_s(run: Run) -> float:
    return max(run.duration_s, float(run.records.finished_s.max()) if len(run.records) else 0.0)
