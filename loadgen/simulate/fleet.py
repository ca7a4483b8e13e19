"""Users, gateways and pods in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.contract.keys import key_seed
from engine.sched.request import Request
from engine.sched.scheduler import QueueFull, TokenOutput
from engine.tiers.stores.emulated_shared import EmulatedFolder
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, start_times_s
from loadgen.measure.records import RequestRecord
from loadgen.simulate.faults import Fault, FaultKind
from loadgen.simulate.gateway import MAX_ATTEMPTS, MODEL, Gateway
from loadgen.simulate.peer_stream import PeerStream
from loadgen.simulate.pods.digests import SharedDigests
from loadgen.simulate.pods.pod import PodSpec, Report, SimPod
from loadgen.simulate.pods.routing import HELD, Offered, Router, Scrape
from loadgen.simulate.pods.tiers import VirtualTimers
from loadgen.simulate.pods.timeline import Timeline
from loadgen.simulate.prompts import TOKEN_BYTES, PromptMaker, SharedSpans
from loadgen.workloads.base import Session, Workload

SHARES_EVERY_S = 1.0
SWEEP_EVERY_S, SWEEP_KEYS = 0.05, 2_000


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The fleet, without traffic and routing."""

    pods: tuple[PodSpec, ...]
    faults: tuple[Fault, ...] = ()
    stride: int = 256
    network_s: float = 0.001
    """Delay one way between client and engine, including tokenizing."""
    event_delay_s: float = 0.002
    """Delay between a pod's message and a gateway's index: Redis and the network."""
    discovery_s: float = 1.0
    """Delay until gateways know of a pod's death or start."""
    refuse_s: float = 0.05
    """Delay until a gateway finds a dead pod unreachable."""
    publishes: bool = True
    """Whether pods publish their keys and their load; foreign engines do not."""
    tells_capacity: bool = True
    """Whether a pod that publishes nothing tells how many tokens its cache has room for."""
    shared_tokens: int = 0
    """Capacity in tokens of the folder that pods with a shared tier share."""
    shares: bool = False
    """Whether gateways tell each other about pods that publish nothing, at the same times as real gateways."""
    share_delay: float = 1.0
    """Delay of messages between gateways, relative to the measured delay of real gateways (`telling.py`)."""
    scrape_delay_s: float = 0.01
    """Delay between a pod's answer to a scrape and the moment when the router uses that answer."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A request between its intended send time and its end."""

    session: _Play
    turn: int
    offered: Offered
    router: Router
    intended_s: float
    request: Request | None = None
    pod: str = ""
    tried: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    first_token_s: float | None = None


@dataclass(slots=True, eq=False)
class _Play:
    session: Session
    answers: dict[int, list[int]] = field(default_factory=dict)
    open_turns: int = 0


@dataclass(slots=True, eq=False)
class _Periodic:
    """An action that repeats while requests are in flight."""

    every_s: float
    act: Callable[[], None]
    due_s: float = 0.0


class Simulation:
    """One run. `on_record` gets each request's record when it ends."""

    def __init__(
        self,
        spec: FleetSpec,
        workload: Workload,
        arrivals: ArrivalSpec,
        *,
        sessions: int,
        seed: int,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self.timeline = Timeline()
        self.pods: dict[str, SimPod] = {}
        self.spec = spec
        self._workload = workload
        self._arrivals = arrivals
        self._sessions = sessions
        self._seed = seed
        self._on_record = on_record
        self._routers: Sequence[Router] = ()
        self._prompts = PromptMaker(key_seed(MODEL), spec.stride)
        self._spans = SharedSpans(spec.stride)
        self._digests = SharedDigests()
        self.folder = self._make_folder()
        self._flights: dict[int, _Flight] = {}
        self._count = 0
        self._unstarted = 0
        self._started_all = False
        self._known = {pod.name for pod in spec.pods}
        """The pods that discovery shows."""
        self._paused: list[_Periodic] = []
        self._is_sweeping = False
        for pod in spec.pods:
            self._start_pod(pod)

    @property
    def busy(self) -> bool:
        """Return whether a request is in flight or still to come."""
        return not self._started_all or bool(self._flights) or self._unstarted > 0

    def told_capacity(self, name: str) -> tuple[int, int] | None:
        """Return the tokens that fit a pod's cache, and the tokens in a block; None if the pod does not tell."""
        pod = self.pods.get(name)
        if pod is None or self.spec.publishes or not self.spec.tells_capacity:
            return None
        return pod.spec.kv_tokens or pod.spec.profile.kv_tokens, pod.spec.block_size

    def run(self, routers: Sequence[Router]) -> None:
        """Play everything; requests are dealt to the routers in turn."""
        self._routers = routers
        for router in routers:
            router.pods_changed(sorted(self._known), 0.0)
            if router.scrape_s:
                self._again(_Periodic(router.scrape_s, partial(self._scrape, router)))
        for fault in self.spec.faults:
            self.timeline.at(fault.at_s, partial(self._fault, fault))
        if len(routers) > 1:
            gateways = self._gateways()
            self._beliefs = PeerStream(self.timeline, gateways, seed=self._seed, scale=self.spec.share_delay)
            for gateway in gateways:
                gateway.tell_with(partial(self._tell_soon, gateway))
        if len(self._gateways()) > 1:
            self._again(_Periodic(SHARES_EVERY_S, self._exchange_shares))
        self._begin_sessions()
        while self.busy and self.timeline.step():
            pass

    def send(self, number: int, pod: str | None) -> None:
        """Send a request that a router held; `pod` None: no pod is left for it."""
        if pod is None:
            self._finish(self._flights[number], "no pod")
        else:
            self._send(self._flights[number], pod)

    # -- users ----------------------------------------------------------------------------------------------------

    def _begin_sessions(self) -> None:
        numbers = iter(range(self._sessions))
        if self._arrivals.kind is ArrivalKind.CLOSED:
            self._closed = numbers
            for _ in range(self._arrivals.concurrency):
                self._next_closed()
            return
        times = None if self._arrivals.kind is ArrivalKind.TRACE else start_times_s(self._arrivals, self._seed)
        self._next_open(numbers, times)

    def _next_open(self, numbers: Iterator[int], times: Iterator[float] | None) -> None:
        number = next(numbers, None)
        if number is None:
            self._started_all = True
            return
        session = self._workload.session(number)
        at_s = next(times) if times is not None else session.start_s or 0.0

        def begin() -> None:
            self._play(session)
            self._next_open(numbers, times)

        self.timeline.at(at_s, begin)

    def _next_closed(self) -> None:
        number = next(self._closed, None)
        if number is None:
            self._started_all = True
        else:
            self._play(self._workload.session(number))

    def _play(self, session: Session) -> None:
        self._go_on(_Play(session), after=-1)

    def _go_on(self, play: _Play, after: int) -> None:
        """Send the turns that follow `after`, each after its pause."""
        for turn, following in enumerate(play.session.turns):
            if following.after == after:
                play.open_turns += 1
                self._unstarted += 1
                self.timeline.after(following.think_s, partial(self._ask, play, turn))
        if not play.open_turns and self._arrivals.kind is ArrivalKind.CLOSED:
            self._next_closed()

    def _ask(self, play: _Play, turn: int) -> None:
        self._unstarted -= 1
        self._resume()
        number = self._count
        self._count += 1
        prompt = self._prompts.prompt(play.session, turn, play.answers)
        router = self._routers[number % len(self._routers)]
        output_tokens = max(1, play.session.turns[turn].output_tokens)
        offered = Offered(number, play.session.number, prompt.tokens, prompt.keys, output_tokens, prompt.user_start)
        flight = self._flights[number] = _Flight(play, turn, offered, router, self.timeline.now_s)
        self._route(flight)

    # -- one request ----------------------------------------------------------------------------------------------

    def _route(self, flight: _Flight) -> None:
        pod = flight.router.choose(flight.offered, flight.tried, self.timeline.now_s)
        if pod is None:
            self._finish(flight, "no pod")
        elif pod != HELD:
            self._send(flight, pod)

    def _send(self, flight: _Flight, pod: str) -> None:
        flight.pod = pod
        flight.request = None
        flight.tried.append(pod)
        self.timeline.after(self.spec.network_s, partial(self._reach, flight))

    def _reach(self, flight: _Flight) -> None:
        pod = self.pods.get(flight.pod)
        if pod is None:
            self.timeline.after(self.spec.refuse_s, partial(self._lost, flight, len(flight.tried)))
            return
        offered = flight.offered
        flight.request = Request(
            offered.number, offered.tokens, offered.output_tokens, key_spans=self._spans.of(offered.keys)
        )
        try:
            pod.submit(flight.request)
        except ValueError:
            self._refused(flight, "too long")
        except QueueFull:
            self._refused(flight, "queue full")

    def _refused(self, flight: _Flight, why: str) -> None:
        flight.router.ended(flight.offered, flight.pod, self.timeline.now_s, completed=False)
        self._finish(flight, why)

    def _lost(self, flight: _Flight, attempt: int) -> None:
        """Handle the loss of a request's pod: retry on another pod if no token came yet, else fail the request.

        Do nothing if the request has ended meanwhile, because the end of its answer was on its way, or if it was
        retried.
        """
        if flight.offered.number not in self._flights or len(flight.tried) != attempt:
            return
        flight.router.ended(flight.offered, flight.pod, self.timeline.now_s, completed=False)
        if flight.first_token_s is None and len(flight.tried) < MAX_ATTEMPTS:
            self._route(flight)
        else:
            self._finish(flight, "disconnected")

    def _output(self, output: TokenOutput) -> None:
        flight = self._flights.get(output.request_id)
        if flight is not None:
            self.timeline.after(self.spec.network_s, partial(self._heard, flight, output))

    def _heard(self, flight: _Flight, output: TokenOutput) -> None:
        now_s = self.timeline.now_s
        if flight.first_token_s is None:
            flight.first_token_s = now_s
            flight.cached_tokens = output.cached_tokens
            flight.router.first_token(flight.offered, flight.pod, output.cached_tokens, now_s)
        if output.finish:
            flight.router.ended(flight.offered, flight.pod, now_s, completed=True)
            self._finish(flight, None)

    def _finish(self, flight: _Flight, failure: str | None) -> None:
        del self._flights[flight.offered.number]
        self._on_record(self._record(flight, failure))
        play = flight.session
        play.open_turns -= 1
        if failure is None:
            assert flight.request is not None
            play.answers[flight.turn] = flight.request.output_tokens
            self._go_on(play, after=flight.turn)
        elif not play.open_turns and self._arrivals.kind is ArrivalKind.CLOSED:
            self._next_closed()

    def _record(self, flight: _Flight, failure: str | None) -> RequestRecord:
        session = flight.session.session
        return RequestRecord(
            session=session.number,
            turn=flight.turn,
            group=session.group,
            intended_s=flight.intended_s,
            sent_s=flight.intended_s,
            finished_s=self.timeline.now_s,
            first_token_s=flight.first_token_s,
            prompt_tokens=len(flight.offered.tokens),
            cached_tokens=flight.cached_tokens,
            output_tokens=flight.offered.output_tokens if failure is None else 0,
            has_usage=failure is None,
            pod=flight.pod,
            policy=flight.router.name,
            failure=failure,
            prompt_bytes=TOKEN_BYTES * len(flight.offered.tokens),
            prefix_keys=flight.offered.keys,
            after=session.turns[flight.turn].after,
        )

    # -- pods -----------------------------------------------------------------------------------------------------

    def _make_folder(self) -> EmulatedFolder | None:
        if not self.spec.shared_tokens:
            return None
        return EmulatedFolder(VirtualTimers(self.timeline), self.spec.shared_tokens // self.spec.pods[0].block_size)

    def _start_pod(self, spec: PodSpec) -> None:
        self.pods[spec.name] = SimPod(spec, self.timeline, self._output, self._published, self._digests, self.folder)

    def _fault(self, fault: Fault) -> None:
        self._resume()
        match fault.kind:
            case FaultKind.SLOW:
                if fault.pod in self.pods:
                    self.pods[fault.pod].slow_to(fault.speed)
                return
            case FaultKind.JOIN:
                assert fault.spec is not None
                if fault.pod in self._known:  # a new epoch shows that the old process died
                    self._discover(fault.pod, alive=False)
                self._start_pod(fault.spec)
                self.timeline.after(self.spec.discovery_s, partial(self._discover, fault.pod, alive=True))
            case FaultKind.DIE:
                self._kill(fault.pod)
                self.timeline.after(self.spec.discovery_s, partial(self._discover, fault.pod, alive=False))

    def _kill(self, name: str) -> None:
        pod = self.pods.pop(name, None)
        if pod is None:
            return
        pod.die()
        for flight in [flight for flight in self._flights.values() if flight.pod == name and flight.request]:
            self.timeline.after(self.spec.network_s, partial(self._lost, flight, len(flight.tried)))

    def _discover(self, pod: str, *, alive: bool) -> None:
        if alive == (pod in self._known):
            return
        (self._known.add if alive else self._known.discard)(pod)
        for router in self._routers:
            router.pods_changed(sorted(self._known), self.timeline.now_s)
        if not self._is_sweeping:
            self._sweep()

    def _published(self, pod: str, report: Report) -> None:
        for router in self._routers:
            if router.takes_reports:
                self.timeline.after(self.spec.event_delay_s, partial(self._deliver, router, pod, report))

    def _deliver(self, router: Router, pod: str, report: Report) -> None:
        if pod in self.pods:
            router.reported(pod, report, self.timeline.now_s)

    # -- periodic actions -----------------------------------------------------------------------------------------

    def _again(self, periodic: _Periodic) -> None:
        """Do the action, and repeat it a period later. In an idle fleet nothing changes. So the action waits there for
        the next request, and simulating idle hours takes no time."""
        periodic.act()
        periodic.due_s = self.timeline.now_s + periodic.every_s
        if self._flights:
            self.timeline.at(periodic.due_s, partial(self._again, periodic))
        else:
            self._paused.append(periodic)

    def _resume(self) -> None:
        """Resume the paused actions, each at a multiple of its period."""
        now_s = self.timeline.now_s
        for periodic in self._paused:
            missed = max(0, math.ceil((now_s - periodic.due_s) / periodic.every_s))
            self.timeline.at(periodic.due_s + missed * periodic.every_s, partial(self._again, periodic))
        self._paused.clear()

    def _scrape(self, router: Router) -> None:
        if isinstance(router, Gateway):
            router.scrapes()
        for name, pod in self.pods.items():
            load = pod.scheduler.load()
            used = 1 - load.blocks_free / load.blocks_total
            scrape = Scrape(load.running, load.waiting, used)
            self.timeline.after(self.spec.scrape_delay_s, partial(self._scraped, router, name, scrape))

    def _scraped(self, router: Router, pod: str, scrape: Scrape) -> None:
        router.scraped(pod, scrape, self.timeline.now_s)

    def _gateways(self) -> list[Gateway]:
        return [router for router in self._routers if isinstance(router, Gateway)]

    def _tell_soon(self, by: Gateway) -> None:
        """Simulate what `router.peer_sync.sender` does through Redis."""
        due_s = by.told_at_s(len(self._gateways()))
        if due_s <= self.timeline.now_s:
            self._tell(by)
        elif due_s < math.inf:
            self.timeline.at(due_s, partial(self._tell_soon, by))

    def _tell(self, by: Gateway) -> None:
        for message in by.told(self.timeline.now_s, len(self._gateways())):
            self._beliefs.append(by, message)

    def _exchange_shares(self) -> None:
        """Simulate what `router.peer_sync.share_sync` does through Redis."""
        gateways = self._gateways()
        now_s = self.timeline.now_s
        for gateway in gateways:
            for model, shares in gateway.shares().items():
                report = shares.export(now_s)
                for other in gateways:
                    theirs = other.shares().get(model)
                    if other is not gateway and theirs is not None:
                        theirs.merge(gateway.chooser_name, report, now_s)

    def _sweep(self) -> None:
        """After pods left, forget their keys step by step until none is left."""
        left = [gateway.sweep(SWEEP_KEYS) for gateway in self._gateways()]
        self._is_sweeping = any(left)
        if self._is_sweeping:
            self.timeline.after(SWEEP_EVERY_S, self._sweep)
