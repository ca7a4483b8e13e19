"""Plays sessions against a server: each at its intended time, its follow-ups after the answer and a pause."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine.contract.collector import quiet_collector
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, start_times_s
from loadgen.load.clock import clock_of
from loadgen.load.process import first_of, raise_file_limit
from loadgen.load.target import Call
from loadgen.measure.records import KEPT_KEYS, RecordLog, Records, RequestRecord
from loadgen.workloads.base import Session, Workload

QUANTUM_S = 0.001
"""The dispatcher wakes at most this often and sends all that is due: the resolution of the event loops' timers."""
AHEAD_S, AHEAD_CALLS = 0.25, 256
"""First requests of sessions are built up to this long, and this many, before they are due, so that a burst leaves at
once."""
TURN_S = 0.002
"""Longest the dispatcher builds requests ahead before it lets answers be read, whose times it would spoil."""


class Sender(Protocol):
    """What the player needs of `loadgen.load.client.Client`."""

    def call(
        self,
        messages: list[dict[str, str]],
        max_tokens: int,
        *,
        session: int,
        turn: int,
        after: int,
        group: str,
        intended_s: float,
        deadline_s: float,
    ) -> Call:
        """A request ready to send."""
        ...

    async def send(self, call: Call) -> tuple[RequestRecord, str]:
        """What became of it, and the answer's text; ends by the call's deadline."""
        ...


class Rendering(Protocol):
    """What the player needs of `loadgen.workloads.render.Renderer`."""

    def messages(self, session: Session, turn: int, answers: Mapping[int, str]) -> list[dict[str, str]]:
        """The chat messages of one turn, given the answers so far by turn."""
        ...


@dataclass(frozen=True, slots=True)
class RunSpec:
    """How one arm, or one block of it, plays its sessions. Plain values: it travels to worker processes."""

    arrivals: ArrivalSpec
    seed: int
    time_limit_s: float
    """The arm ends here: requests under way are recorded as failed 'cut off', the rest counts as not sent."""
    sessions: int | None = None
    """How many; None: as many as the workload has and the time limit allows."""
    first_session: int = 0
    salt: str = ""
    """What the renderer puts before each prompt; `play_parallel` makes its renderers with it."""
    max_in_flight: int | None = None
    """Requests under way at most; others wait, and their latency counts from when they should have been sent."""
    keep_gaps: bool = False
    """Keep each request's gaps on disk."""
    worker: int = 0
    workers: int = 1
    """This process plays every `workers`-th session, from `worker` on; its caps are its share already."""


@dataclass(slots=True)
class Tally:
    """Requests so far: what a progress display needs while a run lasts."""

    sent: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.sent == self.completed + self.failed


@dataclass(frozen=True, slots=True, eq=False)
class ArmRun:
    """Everything that happened in one arm."""

    records: Records
    planned: int
    """Requests the schedule holds; those without a record were not sent."""
    start_s: float
    """The run's start on this machine's monotonic clock, from which times in `records` count."""
    duration_s: float
    """From the start until the last request ended."""


async def play(
    client: Sender,
    workload: Workload,
    renderer: Rendering,
    spec: RunSpec,
    on_record: Callable[[RequestRecord], None] | None = None,
    *,
    start_s: float | None = None,
    tally: Tally | None = None,
) -> ArmRun:
    """Play the sessions, or as many as `time_limit_s` allows. `on_record` hears of each request as it ends.

    `start_s` is an instant on the event loop's clock, None for now. Cancellation closes what is under way.
    """
    clock = clock_of(asyncio.get_running_loop())
    raise_file_limit()
    tally = tally or Tally()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(quiet_collector(lambda: tally.is_idle))
        start_s = clock() if start_s is None else start_s  # not before the collector is done: it may take 0.1 s
        kept_keys = KEPT_KEYS // spec.workers
        log = stack.enter_context(RecordLog(start_s, keep_gaps=spec.keep_gaps, kept_keys=kept_keys))
        schedule = _Schedule(workload, spec, start_s)
        arm = _Arm(client, renderer, spec, clock, start_s, log, on_record, tally)
        try:
            await (arm.closed_loop if spec.arrivals.kind is ArrivalKind.CLOSED else arm.open_loop)(schedule)
        except BaseExceptionGroup as group:  # of tasks that all fail alike: one says it
            raise first_of(group) from None
        duration_s = clock() - start_s
        return ArmRun(log.finish(), await schedule.planned(arm.begun), start_s, duration_s)


class _Schedule:
    """This worker's sessions with their start times, made one at a time; counts the requests they plan."""

    def __init__(self, workload: Workload, spec: RunSpec, start_s: float) -> None:
        self._workload = workload
        self._spec = spec
        self._start_s = start_s
        self._planned = 0
        self._sessions = self._draw()

    def next(self) -> tuple[float, Session] | None:
        """The next session and its start on the run's clock; None after the last. Raises ValueError out of order."""
        return next(self._sessions, None)

    async def planned(self, begun: int) -> int:
        """Requests of all sessions, drawn or not. Where their number is open: `begun`, those of the sessions begun."""
        if self._spec.sessions is None and self._workload.length is None:
            return begun
        for count, _ in enumerate(self._sessions):
            if count % 256 == 255:
                await asyncio.sleep(0)  # a long rest must not keep Ctrl-C waiting
        return self._planned

    def _draw(self) -> Iterator[tuple[float, Session]]:
        spec = self._spec
        ends = [spec.first_session + spec.sessions if spec.sessions is not None else None, self._workload.length]
        end = min((end for end in ends if end is not None), default=None)
        numbers = itertools.count(spec.first_session) if end is None else range(spec.first_session, end)
        offsets = None if spec.arrivals.kind in _TIMELESS else start_times_s(spec.arrivals, spec.seed)
        first_s, last_s = None, 0.0
        for number in numbers:
            offset_s = next(offsets) if offsets else 0.0  # for each session, also another worker's: the same times
            if first_s is None and spec.arrivals.kind is ArrivalKind.TRACE:
                # a block of a trace begins at its own first session, not where the trace began
                first_s = self._trace_time_s(self._workload.session(number)) if spec.first_session else 0.0
            if (number - spec.first_session) % spec.workers != spec.worker:
                continue
            session = self._workload.session(number)
            if first_s is not None:
                offset_s = self._trace_time_s(session) - first_s
            if offset_s < last_s:
                raise ValueError(f"session {number} starts before the session before it: sort the trace by time")
            last_s = offset_s
            self._planned += len(session.turns)
            yield self._start_s + offset_s, session

    def _trace_time_s(self, session: Session) -> float:
        if session.start_s is None:
            raise ValueError(
                f"arrivals are the trace's, but session {session.number} of {self._workload.name} has no time"
            )
        return session.start_s


_TIMELESS = (ArrivalKind.CLOSED, ArrivalKind.TRACE)
Spawn = Callable[[Any], object]


@dataclass(slots=True)
class _Arm:
    client: Sender
    renderer: Rendering
    spec: RunSpec
    clock: Callable[[], float]
    start_s: float
    log: RecordLog
    on_record: Callable[[RequestRecord], None] | None
    tally: Tally
    begun: int = 0
    """Requests that the sessions begun plan."""
    deadline_s: float = field(init=False)
    slots: asyncio.Semaphore | None = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.start_s + self.spec.time_limit_s
        caps = [self.spec.max_in_flight]
        if self.spec.arrivals.kind is ArrivalKind.CLOSED:
            caps.append(self.spec.arrivals.concurrency)  # branches of one session would exceed it
        cap = min((cap for cap in caps if cap is not None), default=None)
        self.slots = None if cap is None else asyncio.Semaphore(cap)

    # -- who starts sessions -------------------------------------------------------------------------------------

    async def open_loop(self, schedule: _Schedule) -> None:
        """Start each session at its time, however slow the server is."""
        ahead: deque[tuple[float, Session, list[Call]]] = deque()
        upcoming = schedule.next()
        async with asyncio.TaskGroup() as tasks:
            began_s = self.clock()
            while ahead or upcoming is not None:
                now_s = self.clock()
                while ahead and ahead[0][0] <= now_s:
                    start_s, session, calls = ahead.popleft()
                    self._start(session, start_s, tasks.create_task, calls)
                if now_s >= self.deadline_s or (not ahead and upcoming and upcoming[0] > self.deadline_s):
                    break
                if upcoming is not None and upcoming[0] - AHEAD_S <= now_s and len(ahead) < AHEAD_CALLS:
                    start_s, session = upcoming
                    ahead.append((start_s, session, self._first_calls(session, start_s)))
                    upcoming = schedule.next()
                    if now_s - began_s > TURN_S:
                        await asyncio.sleep(0)
                        began_s = self.clock()
                    continue
                wake_s = ahead[0][0] if ahead else (upcoming[0] - AHEAD_S if upcoming else now_s)
                await asyncio.sleep(max(min(wake_s, self.deadline_s) - now_s, QUANTUM_S))
                began_s = self.clock()

    async def closed_loop(self, schedule: _Schedule) -> None:
        """Let `concurrency` users play one session after the other."""
        await asyncio.sleep(self.start_s - self.clock())

        async def user() -> None:
            while self.clock() < self.deadline_s and (drawn := schedule.next()) is not None:
                async with asyncio.TaskGroup() as tasks:
                    self._start(drawn[1], self.clock(), tasks.create_task)

        async with asyncio.TaskGroup() as users:
            for _ in range(self.spec.arrivals.concurrency):
                users.create_task(user())

    # -- what happens in one -------------------------------------------------------------------------------------

    def _start(self, session: Session, start_s: float, spawn: Spawn, calls: list[Call] | None = None) -> None:
        answers: dict[int, str] = {}
        self.begun += len(session.turns)
        for position, turn in enumerate(_roots(session)):
            call = calls[position] if calls else None
            intended_s = start_s + session.turns[turn].think_s
            spawn(self._branch(session, turn, intended_s, answers, spawn, call))

    async def _branch(
        self,
        session: Session,
        turn: int,
        intended_s: float,
        answers: dict[int, str],
        spawn: Spawn,
        call: Call | None = None,
    ) -> None:
        """The turn, then what goes on from it. A failed turn ends its branch: there is no answer to go on from."""
        while intended_s <= self.deadline_s:
            call = call or self._call(session, turn, answers, intended_s)  # before it is due: the pause is there for it
            while (wait_s := intended_s - self.clock()) > 0:  # noqa: ASYNC110  # timers may fire early
                await asyncio.sleep(max(wait_s, QUANTUM_S))
            record = await self._send(call, answers)
            call = None
            if record is None or record.failure is not None:
                return
            following = [number for number, after in enumerate(session.turns) if after.after == turn]
            if not following:
                return
            for other in following[1:]:
                think_s = session.turns[other].think_s
                spawn(self._branch(session, other, record.finished_s + think_s, answers, spawn))
            turn = following[0]
            intended_s = record.finished_s + session.turns[turn].think_s

    def _first_calls(self, session: Session, start_s: float) -> list[Call]:
        return [self._call(session, turn, {}, start_s + session.turns[turn].think_s) for turn in _roots(session)]

    def _call(self, session: Session, turn: int, answers: dict[int, str], intended_s: float) -> Call:
        return self.client.call(
            self.renderer.messages(session, turn, answers),
            session.turns[turn].output_tokens,
            session=session.number,
            turn=turn,
            after=session.turns[turn].after,
            group=session.group,
            intended_s=intended_s,
            deadline_s=self.deadline_s,
        )

    async def _send(self, call: Call, answers: dict[int, str]) -> RequestRecord | None:
        """None: the run's time was up before the cap on requests in flight let it go."""
        if self.slots is None:
            return await self._sent(call, answers)
        if self.slots.locked():
            waits_s = self.clock()
            try:
                async with asyncio.timeout_at(self.deadline_s):
                    await self.slots.acquire()
            except TimeoutError:
                return None
            call = replace(call, queued_s=self.clock() - waits_s)
        else:
            await self.slots.acquire()
        try:
            return await self._sent(call, answers)
        finally:
            self.slots.release()

    async def _sent(self, call: Call, answers: dict[int, str]) -> RequestRecord:
        self.tally.sent += 1
        record, answer = await self.client.send(call)
        answers[call.turn] = answer
        if record.failure is None:
            self.tally.completed += 1
        else:
            self.tally.failed += 1
        self.log.add(record)
        if self.on_record is not None:
            self.on_record(record)
        return record


def _roots(session: Session) -> list[int]:
    return [number for number, turn in enumerate(session.turns) if turn.after < 0]
