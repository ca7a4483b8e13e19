"""The value of keeping conversations while a tool runs: as clients ask, or for a time learnt from earlier pauses.

    python -m tests.bench.engine.bench_retention [--workload agentic] [--eviction lru lfu] [--one-off 0 1] [--share 0.5]
        [--regenerate 0.1]

One emulated pod (h100-8b) in virtual time serves the load generator's agents and, for each request of an agent,
`--one-off` prompts that come only once. `none`: nothing is kept. `asked`: each request of an agent marks its whole
prompt for five minutes. `learnt`: each request says that it has tools, and brings a tool's result. Hit rates and TTFTs
(in seconds) are those of agents' prompts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.backend.profiles import PROFILES
from engine.cache.eviction import Eviction
from engine.sched.output import TokenOutput
from engine.sched.request import CacheMark, Request, ToolUse
from loadgen.simulate.pods.pod import PodSpec, SimPod
from loadgen.simulate.pods.timeline import Timeline
from loadgen.simulate.prompts import PromptMaker
from loadgen.workloads.agentic import Agentic
from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.kinds import KINDS

KEPT = ("none", "asked", "learnt")
MARK_S = 300.0
READING_S = 10.0
"""Mean seconds after which an answer is regenerated."""
BLOCK = 16


@dataclass(frozen=True)
class Case:
    """The settings of a run."""

    workload: Agentic
    agents: int
    at_once: int
    """Agents that work at a time."""
    one_off: float
    """One-off prompts for each request of an agent."""
    one_off_tokens: int
    kv_tokens: int
    share: float
    """Share of the pool that may be kept."""
    regenerate: float
    """Share of the answers that are regenerated."""


@dataclass
class Outcome:
    """The results of the agents' requests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    given_up: int = 0

    def at(self, share: float) -> float:
        """Return the TTFT at this quantile."""
        return sorted(self.ttft_s)[min(int(share * len(self.ttft_s)), len(self.ttft_s) - 1)]


@dataclass
class _Flight:
    request: Request
    session: Session | None
    turn: int
    sent_s: float
    is_again: bool = False
    has_begun: bool = False


class _Play:
    """One run: agents follow one another, `at_once` at a time."""

    def __init__(self, case: Case, kept: str, eviction: Eviction) -> None:
        self.case, self.kept = case, kept
        self.timeline = Timeline()
        self.outcome = Outcome()
        spec = PodSpec(
            "pod",
            PROFILES["h100-8b"],
            block_size=BLOCK,
            kv_tokens=case.kv_tokens,
            eviction=eviction,
            pin_share=case.share if kept == "asked" else 0.0,
            keep_share=case.share if kept == "learnt" else 0.0,
        )
        self.pod = SimPod(spec, self.timeline, self._output, lambda _name, _report: None)
        self.prompts = PromptMaker(1, 256)
        self.rng = random.Random(7)
        self.flights: dict[int, _Flight] = {}
        self.answers: dict[int, dict[int, Sequence[int]]] = {}
        self.next_agent = self.number = 0

    def run(self) -> Outcome:
        for i in range(self.case.at_once):
            self.timeline.after(i * 0.5, self._next)
        while self.timeline.step():
            pass
        self.outcome.ended_s = self.timeline.now_s
        self.outcome.given_up = sum(pins.given_up for pins in self.pod.scheduler.pins)
        return self.outcome

    def _next(self) -> None:
        if self.next_agent < self.case.agents:
            session = self.case.workload.session(self.next_agent)
            self.next_agent += 1
            self.answers[session.number] = {}
            self._ask(session, 0)

    def _ask(self, session: Session, turn: int, *, is_again: bool = False) -> None:
        tokens = self.prompts.prompt(session, turn, self.answers[session.number]).tokens
        marks = (CacheMark(len(tokens), MARK_S),) if self.kept == "asked" else ()
        tools = ToolUse(may_be_called=True, brings_result=turn > 0) if self.kept == "learnt" else None
        asked = Request(0, tokens, session.turns[turn].output_tokens, marks=marks, tools=tools)
        self._send(session, turn, asked, is_again=is_again)
        whole, part = divmod(self.case.one_off, 1)
        for _ in range(int(whole) + (self.rng.random() < part)):
            self.number += 1
            piece = Piece(f"once-{self.number}", self.case.one_off_tokens)
            once = Session(0, "", (Turn((ChatMessage("user", (piece,)),), 100),))
            self._send(None, 0, Request(0, self.prompts.prompt(once, 0, {}).tokens, 100))

    def _send(self, session: Session | None, turn: int, request: Request, *, is_again: bool = False) -> None:
        self.number += 1
        request.id = self.number
        self.flights[request.id] = _Flight(request, session, turn, self.timeline.now_s, is_again)
        self.pod.submit(request)

    def _output(self, output: TokenOutput) -> None:
        flight = self.flights[output.request_id]
        session, now_s = flight.session, self.timeline.now_s
        if not flight.has_begun and session is not None:
            self.outcome.ttft_s.append(now_s - flight.sent_s)
            self.outcome.prompt_tokens += len(flight.request.prompt_tokens)
            self.outcome.cached_tokens += output.cached_tokens
        flight.has_begun = True
        if not output.finish:
            return
        del self.flights[output.request_id]
        if session is None:
            return
        self.answers[session.number][flight.turn] = flight.request.output_tokens
        reader = random.Random(f"{session.number} {flight.turn}")
        if not flight.is_again and reader.random() < self.case.regenerate:
            self.timeline.after(
                reader.expovariate(1 / READING_S), partial(self._ask, session, flight.turn, is_again=True)
            )
            return
        following = flight.turn + 1
        if following < len(session.turns):
            self.timeline.after(session.turns[following].think_s, partial(self._ask, session, following))
        else:
            del self.answers[session.number]
            self.timeline.after(0.5, self._next)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="agentic-small", choices=["agentic", "agentic-small"])
    parser.add_argument("--eviction", nargs="+", default=["lfu"], choices=list(Eviction))
    parser.add_argument("--kept", nargs="+", default=KEPT, choices=KEPT)
    parser.add_argument("--agents", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=30)
    parser.add_argument("--one-off", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--share", type=float, default=0.5, help="share of the pool that may be kept")
    parser.add_argument("--regenerate", type=float, default=0.0, help="share of the answers that are regenerated")
    parser.add_argument(
        "--pool",
        type=float,
        nargs="+",
        default=[0.5, 1.0],
        help="sizes of the pool, relative to what the agents hold at once",
    )
    given = parser.parse_args()
    workload = KINDS[given.workload].build(given.workload, 1, {})
    assert isinstance(workload, Agentic)
    grown = workload.instruction_tokens + (workload.turns_min + workload.turns_max) // 2 * (workload.result_tokens + workload.output_tokens)
    print("| one-off | eviction | pool | kept | hit | TTFT mean | p50 | p95 | ended s | given up |")
    print("|--:|---|--:|---|--:|--:|--:|--:|--:|--:|")
    for one_off in given.one_off:
        for share in given.pool:
            kv_tokens = max(int(share * given.at_once * grown / 2), int(1.6 * grown))
            case = Case(
                workload, given.agents, given.at_once, one_off, grown // 8, kv_tokens, given.share, given.regenerate
            )
            for eviction in map(Eviction, given.eviction):
                for kept in given.kept:
                    done = _Play(case, kept, eviction).run()
                    mean = sum(done.ttft_s) / len(done.ttft_s)
                    cells = (
                        f"{one_off:g}",
                        eviction,
                        f"{kv_tokens:,}",
                        kept,
                        f"{done.cached_tokens / done.prompt_tokens:.3f}",
                        *(f"{seconds:.2f}" for seconds in (mean, done.at(0.5), done.at(0.95))),
                        f"{done.ended_s:.0f}",
                        str(done.given_up),
                    )
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
