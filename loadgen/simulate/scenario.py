"""One run of one arm: its scenario, and its records as columns for `loadgen.measure`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from loadgen.load.arrivals import ArrivalSpec
from loadgen.measure.records import RecordLog, Records, RequestRecord
from loadgen.simulate.arms import make_router
from loadgen.simulate.faults import FaultKind
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.workloads.base import Session, Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a run except the arm. Equal scenarios give equal records, in every process."""

    fleet: FleetSpec
    workload: Workload
    arrivals: ArrivalSpec
    sessions: int
    """Number of sessions, at most as many as the workload has."""
    seed: int
    """Seed of arrivals and of routers that draw at random."""
    gateways: int = 1
    """Number of gateways; requests are dealt to them in turn."""

    def pods(self) -> list[str]:
        """Return every pod that takes part at some time."""
        born = [fault.pod for fault in self.fleet.faults if fault.kind is FaultKind.JOIN]
        return sorted({pod.name for pod in self.fleet.pods} | set(born))


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A `loadgen.measure.columns.Run` in virtual time."""

    records: Records
    planned: int
    """Requests of all sessions; requests that follow a failed one were never sent."""
    duration_s: float
    """Seconds until the last request ended."""
    routers: Mapping[str, object]
    """The arm's gateways by name, in their state after the run: for tests and studies."""


def play(scenario: Scenario, arm: str, on_record: Callable[[RequestRecord], None] | None = None) -> SimulatedRun:
    """Play the scenario with this arm's routers. Raises ValueError for an unknown arm."""
    workload = _Counted(scenario.workload)
    length = workload.length
    with RecordLog() as log:

        def ended(record: RequestRecord) -> None:
            log.add(record)
            if on_record is not None:
                on_record(record)

        simulation = Simulation(
            scenario.fleet,
            workload,
            scenario.arrivals,
            sessions=scenario.sessions if length is None else min(scenario.sessions, length),
            seed=scenario.seed,
            on_record=ended,
        )
        names = [f"gateway-{number}" for number in range(scenario.gateways)]
        stride = scenario.fleet.stride
        routers = {
            name: make_router(arm, simulation, 1000 * scenario.seed + number, stride)
            for number, name in enumerate(names)
        }
        with _no_collector():
            simulation.run(list(routers.values()))
        records = log.finish()
    duration_s = float(records.finished_s.max()) if len(records) else 0.0
    return SimulatedRun(records, workload.turns, duration_s, routers)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Collect garbage before the run, not during it. Until it ends, a run leaves no cycles, and scanning its caches
    takes long."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Counted:
    """A workload that counts the turns of the requested sessions."""

    def __init__(self, base: Workload) -> None:
        self._base = base
        self.turns = 0

    @property
    def name(self) -> str:
        return self._base.name

    @property
    def length(self) -> int | None:
        return self._base.length

    def session(self, number: int) -> Session:
        session = self._base.session(number)
        self.turns += len(session.turns)
        return session

    def about(self) -> Mapping[str, str]:
        return self._base.about()
