"""The start times of sessions. Open-loop processes give intended times; the closed loop bounds concurrent sessions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, repeat
from typing import Literal, Self

from pydantic import Field, model_validator

from engine.common.settings import Settings, group
from loadgen.workloads.base import Workload

RampStrategy = Literal["linear", "exponential"]


class ArrivalKind(StrEnum):
    """How sessions arrive."""

    POISSON = "poisson"
    """Independent arrivals: exponential gaps with mean 1 / rate."""
    GAMMA = "gamma"
    """Gamma gaps with mean 1 / rate and coefficient of variation burstiness ** -0.5, as in vLLM's `--burstiness`."""
    CONSTANT = "constant"
    """One session every 1 / rate seconds."""
    BURST = "burst"
    """`burst_size` sessions at the same instant, every burst_size / rate seconds."""
    RAMP = "ramp"
    """A rate that changes from `ramp_start` to `ramp_end` within `ramp_s` and then stays; gaps as for gamma."""
    USERS = "users"
    """`num_users` users; each begins a session every `user_gap_s`, from a random moment of the first gap."""
    CLOSED = "closed"
    """`concurrency` sessions at a time; the next begins when one ends. A slow server gets less load, which hides
    queueing."""
    TRACE = "trace"
    """The workload's own times: `Session.start_s`."""


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """An arrival process. `rate`: sessions per second; infinite: all at once; unused if the process has no rate."""

    kind: ArrivalKind
    rate: float = 1.0
    burst_size: int = 1
    concurrency: int = 1
    burstiness: float = 1.0
    """Shape of the gamma distribution: 1 is Poisson, below 1 is burstier, infinite is constant."""
    ramp_strategy: RampStrategy = "linear"
    ramp_start: float = 1.0
    """Sessions per second."""
    ramp_end: float = 1.0
    """Sessions per second."""
    ramp_s: float = 60.0
    num_users: int = 1
    user_gap_s: float = 1.0

    def about(self) -> str:
        """Return a description of the process."""
        rate = "all at once" if math.isinf(self.rate) else f"{self.rate:.4g} sessions/s"
        words = {
            ArrivalKind.POISSON: f"{rate}, Poisson",
            ArrivalKind.GAMMA: f"{rate}, gamma with burstiness {self.burstiness:g}",
            ArrivalKind.CONSTANT: f"{rate}, constant",
            ArrivalKind.BURST: f"{rate}, in bursts of {self.burst_size}",
            ArrivalKind.RAMP: f"{self.ramp_start:.4g} to {self.ramp_end:.4g} sessions/s within {self.ramp_s:g} s,"
            f" {self.ramp_strategy}, burstiness {self.burstiness:g}",
            ArrivalKind.USERS: f"{self.num_users} users, a session every {self.user_gap_s:g} s each",
            ArrivalKind.CLOSED: f"{self.concurrency} sessions at a time",
            ArrivalKind.TRACE: "at the trace's own times",
        }
        return words[self.kind]


def start_times_s(spec: ArrivalSpec, seed: int) -> Iterator[float]:
    """Yield intended starts in seconds from the arm's start, ascending, without end; equal seeds give equal times.

    Raises ValueError for the closed loop and for traces, which have no such times.
    """
    rng = random.Random(f"{seed}/arrivals")
    if spec.kind in (ArrivalKind.CLOSED, ArrivalKind.TRACE):
        raise ValueError(f"{spec.kind} has no start times of its own")
    if spec.kind is ArrivalKind.USERS:
        return _users(spec.num_users, spec.user_gap_s, rng)
    if spec.kind is ArrivalKind.RAMP:
        return (_ramp_time_s(spec, due) for due in _counted(spec.burstiness, rng))
    if math.isinf(spec.rate):
        return repeat(0.0)
    if spec.kind is ArrivalKind.BURST:
        return (number // spec.burst_size * spec.burst_size / spec.rate for number in _naturals())
    if spec.kind is ArrivalKind.CONSTANT:
        return (number / spec.rate for number in _naturals())
    burstiness = spec.burstiness if spec.kind is ArrivalKind.GAMMA else 1.0
    return (due / spec.rate for due in _counted(burstiness, rng))


def check_times(spec: ArrivalSpec, workload: Workload) -> None:
    """Raise ValueError if arrivals follow a trace's times and the workload has none."""
    if spec.kind is ArrivalKind.TRACE and workload.session(0).start_s is None:
        raise ValueError(f"--arrival trace needs a workload with times of its own; --workload {workload.name} has none")


def _naturals() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _counted(burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of a renewal process of rate 1."""
    if math.isinf(burstiness):
        yield from map(float, _naturals())
    now = 0.0
    while True:
        now += rng.expovariate(1.0) if burstiness == 1 else rng.gammavariate(burstiness, 1 / burstiness)
        yield now


def _users(users: int, gap_s: float, rng: random.Random) -> Iterator[float]:
    phases = sorted(rng.random() * gap_s for _ in range(users))
    rounds = ((number * gap_s + phase for phase in phases) for number in _naturals())
    return chain.from_iterable(rounds)


def _ramp_time_s(spec: ArrivalSpec, due: float) -> float:
    """Return when the expected number of arrivals reaches `due`: the inverse of the integral of the rate."""
    start, end, over_s = spec.ramp_start, spec.ramp_end, spec.ramp_s
    growth = math.log(end / start) if spec.ramp_strategy == "exponential" else 0.0
    during = over_s * ((end - start) / growth if growth else (start + end) / 2)
    if due >= during:
        return over_s + (due - during) / end
    if growth:  # start * over_s / growth * (e ** (growth * t / over_s) - 1) = due
        return over_s / growth * math.log1p(due * growth / (start * over_s))
    # start * t + slope / 2 * t ** 2 = due, solved in the form that also holds for a slope of 0
    slope = (end - start) / over_s
    return 2 * due / (start + math.sqrt(max(0.0, start * start + 2 * slope * due))) if due else 0.0


_OWNED: tuple[tuple[str, frozenset[str]], ...] = (
    ("session_rate", frozenset({"poisson", "gamma", "constant", "burst", "users"})),
    ("request_rate", frozenset({"poisson", "gamma", "constant", "burst", "users"})),
    ("burstiness", frozenset({"gamma", "ramp"})),
    ("burst_size", frozenset({"burst"})),
    ("concurrency", frozenset({"closed"})),
    ("num_users", frozenset({"users"})),
    ("ramp_up_strategy", frozenset({"ramp"})),
    ("ramp_up_start_rps", frozenset({"ramp"})),
    ("ramp_up_end_rps", frozenset({"ramp"})),
    ("ramp_s", frozenset({"ramp"})),
)
"""Flags, and the arrival processes that each belongs to."""
_IMPLIED: tuple[tuple[str, str], ...] = (
    ("ramp_up_strategy", "ramp"),
    ("burstiness", "gamma"),
    ("num_users", "users"),
    ("concurrency", "closed"),
    ("burst_size", "burst"),
)
"""Flags that imply the process if `--arrival` is not given, as in vLLM. The first of these flags that is given
decides."""


@group("When it is sent", common=("arrival", "session_rate", "request_rate", "concurrency"))
class ArrivalSettings(Settings):
    """When requests are sent. A rate is in sessions, or in requests as in vLLM. Both are equal if each session has one
    turn."""

    arrival: Literal["poisson", "gamma", "constant", "burst", "ramp", "users", "closed", "trace"] | None = Field(
        None,
        description="how sessions arrive; closed: --concurrency at a time; trace: at the workload's own"
        " times; none: the one that another flag implies (--burstiness: gamma, --num-users: users, ...), else poisson",
    )
    session_rate: float = Field(1.0, gt=0, description="sessions per second; inf: all at once")
    request_rate: float | None = Field(
        None, gt=0, description="requests per second, instead of --session-rate; inf: all at once; none: not used"
    )
    burstiness: float = Field(
        1.0, gt=0, description="shape of the gamma distribution of gaps: 1 Poisson, below 1 burstier, inf constant"
    )
    burst_size: int = Field(10, ge=1, description="sessions at the same instant (burst)")
    concurrency: int = Field(8, ge=1, description="sessions at a time (closed)")
    num_users: int = Field(
        10, ge=1, le=1_000_000, description="users who begin sessions at equal intervals, together at the rate (users)"
    )
    ramp_up_strategy: RampStrategy = Field("linear", description="how the rate changes (ramp)")
    ramp_up_start_rps: float = Field(1.0, ge=0, description="requests per second at the beginning (ramp)")
    ramp_up_end_rps: float = Field(10.0, gt=0, description="requests per second at the end, kept afterwards (ramp)")
    ramp_s: float = Field(60.0, gt=0, description="seconds from the first to the last rate (ramp)")

    @model_validator(mode="after")
    def _check_arrivals(self) -> Self:
        kind = self._kind()
        for name, kinds in _OWNED:
            if name in self.model_fields_set and getattr(self, name) is not None and kind not in kinds:
                raise ValueError(f"{_dashed(name)} is a flag of --arrival {', '.join(sorted(kinds))}, not of {kind}")
        if {"request_rate", "session_rate"} <= self.model_fields_set:
            raise ValueError("--session-rate and --request-rate exclude each other: give one of them")
        if self.ramp_up_strategy == "exponential" and self.ramp_up_start_rps == 0:
            raise ValueError("--ramp-up-start-rps must be above 0 for --ramp-up-strategy exponential")
        for name in ("ramp_up_start_rps", "ramp_up_end_rps", "ramp_s"):
            if math.isinf(getattr(self, name)):
                raise ValueError(f"{_dashed(name)} must be finite")
        if kind == ArrivalKind.USERS and math.isinf(self._rate(1.0)):
            raise ValueError(
                "--arrival users needs a finite --session-rate or --request-rate, that of all users together"
            )
        return self

    def arrivals(self, turns_per_session: float = 1.0) -> ArrivalSpec:
        """Return the process. The mean number of turns converts rates of requests into rates of sessions."""
        rate = self._rate(turns_per_session)
        return ArrivalSpec(
            ArrivalKind(self._kind()),
            rate,
            burst_size=self.burst_size,
            concurrency=self.concurrency,
            burstiness=self.burstiness,
            ramp_strategy=self.ramp_up_strategy,
            ramp_start=self.ramp_up_start_rps / turns_per_session,
            ramp_end=self.ramp_up_end_rps / turns_per_session,
            ramp_s=self.ramp_s,
            num_users=self.num_users,
            user_gap_s=self.num_users / rate,
        )

    def _rate(self, turns_per_session: float) -> float:
        """Return the sessions per second."""
        if self.request_rate is not None and "session_rate" not in self.model_fields_set:
            return self.request_rate / turns_per_session
        return self.session_rate

    def _kind(self) -> str:
        given = self.model_fields_set
        return self.arrival or next((kind for flag, kind in _IMPLIED if flag in given), "poisson")


def mean_turns(workload: Workload, sessions: int) -> float:
    """Return the mean number of turns of the first sessions, at most 1,000, for `arrivals`."""
    count = min(sessions, 1000, sessions if workload.length is None else workload.length)
    return sum(len(workload.session(number).turns) for number in range(count)) / max(1, count)


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
