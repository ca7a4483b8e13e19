"""The parts of an experiment, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadgen.experiment.arms import ArmSpec
from loadgen.experiment.stopping import Stopping
from loadgen.load.arrivals import ArrivalSpec
from loadgen.load.player import ArmRun
from loadgen.load.target import Target
from loadgen.measure.pods import Counted
from loadgen.workloads.base import Workload


@dataclass(frozen=True, slots=True)
class Round:
    """What every arm plays in one round: sessions of the workload from `first_session` on."""

    workload: Workload
    first_session: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """All settings that decide an experiment."""

    arms: tuple[ArmSpec, ...]
    baseline: str
    target: Callable[[ArmSpec], Target]
    """Returns how an arm is reached."""
    round: Callable[[int], Round]
    """Returns the sessions of round `number`, from 0."""
    arrivals: ArrivalSpec
    sessions: int | None
    """Sessions in each block; None: all of the workload, or as many as the time limit allows."""
    seed: int
    """Round `number` uses the schedule of seed + number."""
    time_limit_s: float
    """Time limit of each block."""
    stopping: Stopping
    distinct_rounds: int | None = None
    """Rounds after this number repeat sessions, because a data set has no more; None: all rounds differ."""
    tokens_per_word: float = 0.0
    """Tokens per word of the model; 0: measured at the first arm."""
    max_in_flight: int | None = None
    workers: int = 1
    warmup_requests: int = 8
    settle_s: float = 1.0
    objectives_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """One arm's part of one round."""

    arm: str
    run: ArmRun
    counted: Counted | None
    """What the pods' counters counted; None: no pods are known."""
