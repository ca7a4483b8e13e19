"""`--events pod-3@20=die,pod-9@30=join,pod-2@10=0.5` as events of the simulated fleet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from loadgen.simulate.faults import Fault, FaultKind
from loadgen.simulate.pods.pod import PodSpec

SLOWEST = 1e-3
"""Least share of a profile's speed: on a slower pod an answer would take years of virtual time."""


def events_of(events: Sequence[str], pods: Sequence[PodSpec]) -> tuple[Fault, ...]:
    """Return the events in order of time. `pods` exist from the start; a pod that joins is like the first of them.

    Raises ValueError, which names the event, if a text cannot be read or if a pod does not exist at the event's time.
    """
    found = sorted((_event(text, pods[0]) for text in events), key=lambda fault: fault.at_s)
    living = {pod.name for pod in pods}
    for fault in found:
        if (fault.pod in living) == (fault.kind is FaultKind.JOIN):
            there = "already running" if fault.pod in living else f"not running; pods are {', '.join(sorted(living))}"
            raise ValueError(f"--events {fault.pod}@{fault.at_s:g}={fault.kind}: {fault.pod} is {there}")
        if fault.kind is FaultKind.JOIN:
            living.add(fault.pod)
        elif fault.kind is FaultKind.DIE:
            living.remove(fault.pod)
    if not living:
        raise ValueError("--events leaves no pod")
    return tuple(found)


def _event(text: str, like: PodSpec) -> Fault:
    where, sign, what = text.rpartition("=")
    pod, at, time = where.rpartition("@")
    at_s = _number(time)
    if not (sign and at and pod) or at_s is None or at_s < 0:
        raise ValueError(f"--events {text!r} must name a pod, seconds of the run, and what happens: pod-3@20=die")
    if what == FaultKind.DIE:
        return Fault(at_s, FaultKind.DIE, pod)
    if what == FaultKind.JOIN:
        return Fault(at_s, FaultKind.JOIN, pod, spec=replace(like, name=pod))
    speed = _number(what)
    if speed is None or not SLOWEST <= speed <= 1 / SLOWEST:
        raise ValueError(
            f"--events {text!r} must end in die, join, or a speed of {SLOWEST:g} to {1 / SLOWEST:g}, 1 being the"
            " profile's: pod-2@10=0.5"
        )
    return Fault(at_s, FaultKind.SLOW, pod, speed=speed)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
