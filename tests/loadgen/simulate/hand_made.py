"""Small workloads, fleets and routers with known behaviour."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.contract.keys import PrefixKey
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.records import RequestRecord
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.faults import Fault
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.pods.pod import Report
from loadgen.simulate.pods.routing import Offered, Router, Scrape
from loadgen.workloads.base import ChatMessage, Piece, Session, Turn, Workload

TRACE = ArrivalSpec(ArrivalKind.TRACE)


@dataclass(frozen=True, slots=True)
class Listed:
    """A workload of exactly the given sessions."""

    sessions: tuple[Session, ...]
    name: str = "listed"

    @property
    def length(self) -> int | None:
        return len(self.sessions)

    def session(self, number: int) -> Session:
        return self.sessions[number]

    def about(self) -> Mapping[str, str]:
        return {}


def turn(*pieces: Piece, output: int = 4, after: int = -1, think_s: float = 0.0) -> Turn:
    return Turn((ChatMessage("user", pieces),), output, after, think_s)


def one(number: int, at_s: float, *pieces: Piece, output: int = 4) -> Session:
    """Return a session of one request."""
    return Session(number, "", (turn(*pieces, output=output),), at_s)


def steady(count: int, every_s: float, tokens: int = 400, output: int = 40) -> Listed:
    """Return unique requests, one every `every_s` seconds."""
    return Listed(tuple(one(n, n * every_s, Piece(f"u{n}", tokens), output=output) for n in range(count)))


@dataclass
class Told:
    """A router that follows a list of pods, then takes the first pod that is not excluded. It notes all calls."""

    wanted: list[str] = field(default_factory=list)
    name: str = "told"
    scrape_s: float = 0.0
    takes_reports: bool = False
    pods: list[str] = field(default_factory=list)
    changes: list[tuple[float, list[str]]] = field(default_factory=list)
    asked: list[tuple[float, int, list[str]]] = field(default_factory=list)
    reports: list[tuple[float, str, Report]] = field(default_factory=list)
    scrapes: list[tuple[float, str, Scrape]] = field(default_factory=list)
    ends: list[tuple[int, str, bool]] = field(default_factory=list)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        self.pods = list(pods)
        self.changes.append((now_s, list(pods)))

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        self.asked.append((now_s, request.number, list(excluded)))
        wanted = self.wanted[request.number % len(self.wanted)] if self.wanted else ""
        left = [pod for pod in self.pods if pod not in excluded]
        return wanted if wanted in left else next(iter(left), None)

    def first_token(self, request: Offered, pod: str, cached_tokens: int, now_s: float) -> None:
        pass

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        self.ends.append((request.number, pod, completed))

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        self.reports.append((now_s, pod, report))

    def scraped(self, pod: str, scrape: Scrape, now_s: float) -> None:
        self.scrapes.append((now_s, pod, scrape))


def fleet(pods: int = 2, *faults: Fault, event_delay_s: float = 0.002, kv_tokens: int = 100_000) -> FleetSpec:
    return FleetSpec(emulated_pods(pods, kv_tokens=kv_tokens), tuple(faults), event_delay_s=event_delay_s)


def run(
    spec: FleetSpec, workload: Workload, *routers: Router, arrivals: ArrivalSpec = TRACE, seed: int = 1
) -> list[RequestRecord]:
    """Return every record, in the order in which requests ended."""
    records: list[RequestRecord] = []
    assert workload.length is not None
    simulation = Simulation(spec, workload, arrivals, sessions=workload.length, seed=seed, on_record=records.append)
    simulation.run(routers)
    return records


def offered(number: int, keys: Sequence[int] = (), tokens: int = 0, first_token: int = 0) -> Offered:
    """Return a request with these prefix keys; its default length follows from the keys."""
    length = tokens or max(1, 64 * len(keys))
    ids = array("i", range(first_token, first_token + length))
    return Offered(number, number, ids, tuple(map(PrefixKey, keys)), output_tokens=10)
