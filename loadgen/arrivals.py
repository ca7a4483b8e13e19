"""When sessions begin. Open-loop processes give intended times; the closed loop bounds what is active."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class ArrivalKind(StrEnum):
    """How sessions arrive."""

    POISSON = "poisson"
    """Independent arrivals: exponential gaps with mean 1 / rate."""
    CONSTANT = "constant"
    """One every 1 / rate seconds."""
    BURST = "burst"
    """`burst_size` at the same instant, every burst_size / rate seconds."""
    CLOSED = "closed"
    """`concurrency` sessions at a time; the next begins when one ends. Hides queueing: a slow server is asked less."""


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """An arrival process. `rate` is in sessions per second and unused in the closed loop."""

    kind: ArrivalKind
    rate: float
    burst_size: int = 1
    concurrency: int = 1


def start_times_s(spec: ArrivalSpec, seed: int) -> Iterator[float]:
    """Intended starts in seconds from the arm's start, without end. Raises ValueError for the closed loop."""
    if spec.kind is ArrivalKind.POISSON:
        return _poisson(spec.rate, random.Random(f"{seed}/arrivals"))
    if spec.kind is ArrivalKind.CONSTANT:
        return _bursts(spec.rate, 1)
    if spec.kind is ArrivalKind.BURST:
        return _bursts(spec.rate, spec.burst_size)
    raise ValueError("a closed loop has no intended start times")


def _poisson(rate: float, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def _bursts(rate: float, size: int) -> Iterator[float]:
    number = 0
    while True:
        for _ in range(size):
            yield number * size / rate
        number += 1
