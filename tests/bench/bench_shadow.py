"""What shadow policies show, beside what the same policies do when they act: part of the prompts cached.

    python -m tests.bench.bench_shadow [--cases gsp_60 multi_60] [--part 0.5] [--seed 1]

A fleet in virtual time (`loadgen.simulate`) serves each case of the policy table once by every policy. Where it is
`predicted_ttft` or `round_robin`, the gateway's shadow code (`router.gateway.shadow`) asks all about each request.
Printed are parts of the prompt tokens: what the engines had cached and what the gateway believed to be, on the pods of
the policy where it acted; then what it believed to be on the pods that the policy chose in the shadow of those two, and
in brackets for how many requests it chose another pod than they did. Equal options print equal tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loadgen.measure.records import RequestRecord
from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import MODEL, Gateway
from loadgen.simulate.study.cases import KNEES, SYNTHETIC, Case
from loadgen.simulate.study.run import STRIDE, summary
from router.gateway.shadow import Shadows
from router.routing.policies import POLICY_NAMES, make_policy
from router.routing.types import Decision, PodView, Policy, RequestInfo
from router.telemetry.metrics import Metrics

CASES = {case.name: case for case in SYNTHETIC if case.is_unhindered}
"""Those in which one gateway sees every request once."""
ACTING = ("predicted_ttft", "round_robin")
"""The policies whose shadows are shown."""


@dataclass(slots=True)
class Seen:
    """What was counted of one policy in the shadow of one that acted, itself included."""

    requests: int = 0
    others: int = 0
    """Requests for which the two chose different pods."""
    prompt_tokens: int = 0
    acting_tokens: int = 0
    """Those believed cached on the pods of the policy that acted."""
    shadow_tokens: int = 0
    """Those believed cached on the pods of the one in its shadow."""


class Counted(Metrics):
    """What a gateway counts of its shadow policies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {name: Seen() for name in POLICY_NAMES}

    def shadowed(
        self,
        policy: str,
        shadow: str,
        *,
        is_same: bool,
        prompt_tokens: int,
        cached_tokens: tuple[int, int],
        ttft_s: tuple[float, float],
    ) -> None:
        """See `Metrics`."""
        seen = self.seen[shadow]
        seen.requests += 1
        seen.others += not is_same
        seen.prompt_tokens += prompt_tokens
        seen.acting_tokens += cached_tokens[0]
        seen.shadow_tokens += cached_tokens[1]

    def shadow_failed(self, policy: str, shadow: str) -> None:
        """A table without some of the requests would be wrong. Raises AssertionError."""
        raise AssertionError(f"{shadow} failed in the shadow of {policy}")


class Acting:
    """A policy after which those in its shadow are asked, as `router.gateway.chooser` does."""

    def __init__(self, name: str, shadows: Shadows) -> None:
        self.name = name
        self._policy = make_policy(name)
        self._shadows = shadows

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy`."""
        decision = self._policy.choose(request, pods, explain=explain)
        self._shadows.compare(MODEL, decision, request, pods, lambda name: name)
        return decision


def make_policies() -> Mapping[str, Policy]:
    """Every policy, new."""
    return {name: make_policy(name) for name in POLICY_NAMES}


def play(case: Case, name: str, shadows: Sequence[str], seed: int) -> tuple[list[RequestRecord], Mapping[str, Seen]]:
    """Serve the case by one policy: its requests, and the policies in its shadow by name."""
    records: list[RequestRecord] = []
    knee, metrics = KNEES.get(case.knee_of, 1.0), Counted()
    acting = Acting(name, Shadows(shadows, make_policies, metrics))
    simulation = Simulation(
        *(case.fleet(knee), case.workload(seed), case.arrivals(knee)),
        sessions=case.requests,
        seed=seed,
        on_record=records.append,
    )
    simulation.run([Gateway(name, simulation.timeline, stride=STRIDE, made=acting)])
    return records, metrics.seen


def table(case: Case, seed: int) -> str:
    """The case's figures as Markdown."""
    played = {name: play(case, name, POLICY_NAMES if name in ACTING else (name,), seed) for name in POLICY_NAMES}
    pods = case.fleet(KNEES.get(case.knee_of, 1.0))
    lines = [
        f"| {case.name} | cached, acting | believed, acting | in the shadow of `{'` | of `'.join(ACTING)}` |",
        "|---|" + "--:|" * (2 + len(ACTING)),
    ]
    for name, (records, seen) in played.items():
        own = seen[name]
        cells = [f"{summary(records, pods).hit_rate:.2f}", f"{own.acting_tokens / own.prompt_tokens:.2f}"]
        for acting in ACTING:
            of = played[acting][1][name]
            part = f"{of.shadow_tokens / of.prompt_tokens:.2f} ({100 * of.others / of.requests:.0f} %)"
            cells.append("-" if acting == name else part)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=["gsp_60", "multi_60"], help="cases (gsp_60 multi_60)"
    )
    parser.add_argument("--part", type=float, default=0.5, help="of the cases' sessions that is played (0.5)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests and of when they come (1)")
    options = parser.parse_args()
    for name in options.cases:
        case = CASES[name]
        case = replace(case, requests=max(1, round(options.part * case.requests)))
        print(f"\n{case.about}, {case.requests:,} sessions, seed {options.seed}\n")
        print(table(case, options.seed), flush=True)


if __name__ == "__main__":
    main()
