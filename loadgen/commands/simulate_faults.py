"""`--die pod-3@20`, `--join pod-9@30`, `--slow pod-2@10=0.5` as events of the simulated fleet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from loadgen.simulate.faults import Fault, FaultKind
from loadgen.simulate.pods.pod import PodSpec

SLOWEST = 1e-3
"""Least share of a profile's speed: on a slower pod an answer would take years of virtual time."""


def faults_of(
    die: Sequence[str], join: Sequence[str], slow: Sequence[str], pods: Sequence[PodSpec]
) -> tuple[Fault, ...]:
    """Return the events in order of time. `pods` exist from the start; a pod that joins is like the first of them.

    Raises ValueError, which names the flag, if a text cannot be read or if a pod does not exist at the event's time.
    """
    found = [_die(text) for text in die] + [_join(text, pods[0]) for text in join] + [_slow(text) for text in slow]
    found.sort(key=lambda fault: fault.at_s)
    living = {pod.name for pod in pods}
    for fault in found:
        if (fault.pod in living) == (fault.kind is FaultKind.JOIN):
            there = "already running" if fault.pod in living else f"not running; pods are {', '.join(sorted(living))}"
            raise ValueError(f"--{fault.kind} {fault.pod}@{fault.at_s:g}: {fault.pod} is {there}")
        if fault.kind is FaultKind.JOIN:
            living.add(fault.pod)
        elif fault.kind is FaultKind.DIE:
            living.remove(fault.pod)
    if not living:
        raise ValueError("--die leaves no pod")
    return tuple(found)


def _die(text: str) -> Fault:
    pod, at_s = _event(text, "--die", "pod-3@20")
    return Fault(at_s, FaultKind.DIE, pod)


def _join(text: str, like: PodSpec) -> Fault:
    pod, at_s = _event(text, "--join", "pod-9@30")
    return Fault(at_s, FaultKind.JOIN, pod, spec=replace(like, name=pod))


def _slow(text: str) -> Fault:
    event, sign, speed = text.rpartition("=")
    factor = _number(speed)
    if not sign or factor is None or not SLOWEST <= factor <= 1 / SLOWEST:
        raise ValueError(
            f"--slow {text!r} must end in a speed of {SLOWEST:g} to {1 / SLOWEST:g}, 1 being the profile's:"
            " pod-2@10=0.5"
        )
    pod, at_s = _event(event, "--slow", "pod-2@10=0.5")
    return Fault(at_s, FaultKind.SLOW, pod, speed=factor)


def _event(text: str, flag: str, example: str) -> tuple[str, float]:
    pod, sign, at = text.rpartition("@")
    at_s = _number(at)
    if not (sign and pod) or at_s is None or at_s < 0:
        raise ValueError(f"{flag} {text!r} must name a pod and seconds of the run, such as {example}")
    return pod, at_s


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
