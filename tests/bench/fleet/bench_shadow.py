"""What shadow policies show, compared with the same policies when they act: the share of the prompts that is cached.

    python -m tests.bench.fleet.bench_shadow [--cases gsp_60 multi_60] [--part 0.5] [--seed 1]

A fleet in virtual time (`loadgen.simulate`) serves each case of the policy table once with every policy. If that policy
is `predicted_ttft` or `round_robin`, the gateway's shadow code (`router.choosing.shadow`) asks all policies about each
request. The table shows shares of the prompt tokens. The first two columns are for the policy when it acts: what the
engines had cached, and what the gateway believed to be cached. The other two are for the policy as a shadow of
`predicted_ttft` and of `round_robin`: what the gateway believed to be cached on the pods that the shadow chose.
Parentheses have the share of the requests for which the shadow and the acting policy chose different pods. Equal
options print equal tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from loadgen.measure.records import RequestRecord
from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import MODEL, Gateway
from router.choosing.shadow import Shadows
from router.routing.policies import POLICY_NAMES, make_policy
from router.telemetry.metrics import Metrics
from router.telemetry.shadows import ShadowMetrics
from router.views.table import CandidatePods, Policy
from router.views.types import Decision, RequestInfo
from tests.bench.policy_table.cases import KNEES, SYNTHETIC, Case
from tests.bench.policy_table.run import STRIDE, summary

CASES = {case.name: case for case in SYNTHETIC if case.is_unhindered}
"""The cases in which one gateway sees every request once."""
ACTING = ("predicted_ttft", "round_robin")
"""The acting policies whose shadows are shown."""


@dataclass(slots=True)
class Seen:
    """Counts for one policy as a shadow of an acting policy. An acting policy is also its own shadow."""

    requests: int = 0
    others: int = 0
    """Requests for which the two chose different pods."""
    prompt_tokens: int = 0
    acting_tokens: int = 0
    """Tokens believed cached on the pods of the acting policy."""
    shadow_tokens: int = 0
    """Tokens believed cached on the pods of the shadow policy."""


class Counted(ShadowMetrics):
    """Keeps what a gateway counts for its shadow policies."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.seen = {name: Seen() for name in POLICY_NAMES}

    def chose(
        self,
        policy: str,
        shadow: str,
        *,
        is_same: bool,
        prompt_tokens: int,
        cached_tokens: tuple[int, int],
        ttft_s: tuple[float, float],
    ) -> None:
        """See `ShadowMetrics`."""
        seen = self.seen[shadow]
        seen.requests += 1
        seen.others += not is_same
        seen.prompt_tokens += prompt_tokens
        seen.acting_tokens += cached_tokens[0]
        seen.shadow_tokens += cached_tokens[1]

    def failed(self, policy: str, shadow: str) -> None:
        """Fail, because a table without some of the requests would be wrong. Raises AssertionError."""
        raise AssertionError(f"{shadow} failed in the shadow of {policy}")


class Acting:
    """A policy that asks its shadows after each decision, as `router.choosing.chooser` does."""

    def __init__(self, name: str, shadows: Shadows) -> None:
        self.name = name
        self._policy = make_policy(name)
        self._shadows = shadows

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy`."""
        decision = self._policy.choose(request, pods, explain=explain)
        self._shadows.compare(MODEL, decision, request, pods, lambda name: name)
        return decision


def make_policies() -> Mapping[str, Policy]:
    """Return new instances of every policy."""
    return {name: make_policy(name) for name in POLICY_NAMES}


def play(case: Case, name: str, shadows: Sequence[str], seed: int) -> tuple[list[RequestRecord], Mapping[str, Seen]]:
    """Serve the case with one policy; return its requests, and its shadow policies by name."""
    records: list[RequestRecord] = []
    knee, metrics, counted = KNEES.get(case.knee_of, 1.0), Metrics(), Counted()
    metrics.shadows = counted
    acting = Acting(name, Shadows(shadows, make_policies, metrics))
    simulation = Simulation(
        case.fleet(knee),
        case.workload(seed),
        case.arrivals(knee),
        sessions=case.requests,
        seed=seed,
        on_record=records.append,
    )
    simulation.run([Gateway(name, simulation.timeline, stride=STRIDE, made=acting)])
    return records, counted.seen


def table(case: Case, seed: int) -> str:
    """Return the case's figures as Markdown."""
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
    parser.add_argument("--part", type=float, default=0.5, help="share of the cases' sessions that is played (0.5)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests and of their times (1)")
    options = parser.parse_args()
    for name in options.cases:
        case = CASES[name]
        case = replace(case, requests=max(1, round(options.part * case.requests)))
        print(f"\n{case.about}, {case.requests:,} sessions, seed {options.seed}\n")
        print(table(case, options.seed), flush=True)


if __name__ == "__main__":
    main()
