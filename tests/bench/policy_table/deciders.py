"""The eight cases that decide whether a part of a policy stays. They were chosen before anything was measured.

All five seeds of the eight cases take about five minutes of one core. The eighth case needs a folder with Mooncake's
`conversation_trace.jsonl`, plain or `.gz`; without the folder it is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.pods.tiers import TierSpec
from loadgen.workloads.base import Workload
from loadgen.workloads.chat import Chat
from tests.bench.policy_table.cases import KNEES, SYNTHETIC, Case, trace_cases
from tests.bench.policy_table.run import Cell, measure

TRACE_REQUESTS = 350
_POOL_TOKENS = 16_000


@dataclass(frozen=True, slots=True)
class Decider:
    """One case."""

    name: str
    about: str
    workload: Callable[[int], Workload]
    """Returns the workload for a seed."""
    arrivals: ArrivalSpec
    fleet: FleetSpec
    sessions: int
    gateways: int = 1

    def run(self, arm: str, seed: int) -> Cell:
        """Play the case once."""
        return measure(self.workload(seed), self.arrivals, self.fleet, arm, seed, self.sessions, self.gateways)


def _of_table(name: str, case: Case, sessions: int) -> Decider:
    """Return a case of the policy table, cut to fewer sessions."""
    case, knee = replace(case, requests=sessions), KNEES.get(case.knee_of, 1.0)
    return Decider(name, case.about, case.workload, case.arrivals(knee), case.fleet(knee), sessions, case.gateways)


def _tiers() -> Decider:
    tiers = TierSpec(4 * _POOL_TOKENS, 50.0, 5.0)
    pods = tuple(replace(pod, tiers=tiers) for pod in emulated_pods(8, kv_tokens=_POOL_TOKENS))
    return Decider(
        "tiers",
        "192 prefixes, thrice what the pools hold, host memory and a shared folder below them, two gateways",
        lambda seed: Chat("prefixes", seed, 192, 0.6, 2000, 2000, 100, 200, 1, 1, output_tokens=32),
        ArrivalSpec(ArrivalKind.POISSON, 100.0),
        FleetSpec(pods, shared_tokens=30 * _POOL_TOKENS),
        600,
        gateways=2,
    )


def deciders(traces: Path | None) -> tuple[Decider, ...]:
    """Return the cases; the eighth only with `traces`. Raises ValueError if the trace is not in that folder."""
    table = {case.name: case for case in SYNTHETIC}
    found = (
        _of_table("shared", table["gsp_90"], 900),
        _of_table("unshared", table["zero_75"], 800),
        _of_table("hot", table["one80_60"], 1000),
        _of_table("chats", table["multi_90"], 160),
        _of_table("gateways", table["foreign_gateways_4"], 800),
        _tiers(),
        _of_table("slow", table["slow_pod"], 900),
    )
    if traces is None:
        return found
    traced = {case.name: case for case in trace_cases(traces)}
    if "conversation_3x" not in traced:
        raise ValueError(f"{traces} has no conversation_trace.jsonl")
    return (*found, _of_table("trace", traced["conversation_3x"], TRACE_REQUESTS))
