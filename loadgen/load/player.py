"""Plays sessions against a server: each begins at its intended time, and its later turns follow an answer and a
pause."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine.common.collector import quiet_collector
from engine.common.descriptors import raise_file_limit
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, start_times_s
from loadgen.load.clock import clock_of
from loadgen.load.process import first_of
from loadgen.load.target import CONNECT, Call
from loadgen.measure.records import KEPT_KEYS, RecordLog, Records, RequestRecord
from loadgen.workloads.base import Session, Workload

QUANTUM_S = 0.001
"""Shortest sleep of the dispatcher, which then sends all due requests. It is the resolution of the event loops'
timers."""
AHEAD_S, AHEAD_CALLS = 0.25, 256
"""The first requests of up to AHEAD_CALLS sessions are built up to AHEAD_S before they are due, so that a burst is sent
without delay."""
TURN_S = 0.002
"""Longest time for which the dispatcher builds requests without a break. Meanwhile no answer is read, so times are
late."""

UNREACHED_S = 1.0
"""Pause of a user of a closed loop whose request got no connection. A refusal takes 0.1 ms, so without a pause a server
that is down for a second would fail thousands of requests."""


class Sender(Protocol):
    """The methods of `loadgen.load.client.Client` that the player needs."""

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
        """Return a request that is ready to send."""
        ...

    async def send(self, call: Call) -> tuple[RequestRecord, str]:
        """Send the request; return its record and the answer's text by the call's deadline."""
        ...


class Rendering(Protocol):
    """The method of `loadgen.workloads.render.Renderer` that the player needs."""

    def messages(self, session: Session, turn: int, answers: Mapping[int, str]) -> list[dict[str, str]]:
        """Return the chat messages of one turn, given the answers so far by turn."""
        ...


@dataclass(frozen=True, slots=True)
class RunSpec:
    """How one arm, or one of its blocks, plays its sessions. It has only plain values, to be sent to workers."""

    arrivals: ArrivalSpec
    seed: int
    time_limit_s: float
    """Seconds after which the arm ends. Requests in flight are then recorded as failed 'cut off'; later ones are not
    sent."""
    sessions: int | None = None
    """Number of sessions; None: as many as the workload has and the time limit allows."""
    first_session: int = 0
    salt: str = ""
    """Text that the renderer puts before each prompt; `play_parallel` makes its renderers with it."""
    max_in_flight: int | None = None
    """Maximum of requests in flight; others wait, and their latency counts from their intended send time."""
    keep_gaps: bool = False
    """Whether to keep the gaps between the chunks of each answer, on disk."""
    keeps_partial: bool = False
    """Whether a cancellation, such as by Ctrl-C, ends the run early instead of discarding it, once a request has ended.
    Requests in flight then have no record."""
    worker: int = 0
    workers: int = 1
    """This process plays every `workers`-th session, beginning with session `worker`. The caps in this spec are the
    process's share."""


@dataclass(slots=True)
class Tally:
    """Counts of requests so far, for a progress display during a run."""

    sent: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no request is in flight."""
        return self.sent == self.completed + self.failed


@dataclass(frozen=True, slots=True, eq=False)
class ArmRun:
    """Everything that happened in one arm."""

    records: Records
    planned: int
    """Requests in the schedule; those without a record were not sent."""
    start_s: float
    """The run's start on this machine's monotonic clock; times in `records` count from it."""
    duration_s: float
    """Seconds from the start to the end of the last request."""
    is_partial: bool = False
    """Whether a cancellation ended it early."""


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
    """Play the sessions, or as many as `time_limit_s` allows. `on_record` gets each request's record when it ends.

    `start_s` is an instant on the event loop's clock; None: now. Cancellation closes the requests in flight; it ends
    the run as `RunSpec.keeps_partial` says.
    """
    clock = clock_of(asyncio.get_running_loop())
    raise_file_limit()
    tally = tally or Tally()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(quiet_collector(lambda: tally.is_idle))
        start_s = clock() if start_s is None else start_s  # after the garbage collection, which may take 0.1 s
        kept_keys = KEPT_KEYS // spec.workers
        log = stack.enter_context(RecordLog(start_s, keep_gaps=spec.keep_gaps, kept_keys=kept_keys))
        schedule = _Schedule(workload, spec, start_s)
        arm = _Arm(client, renderer, spec, clock, start_s, log, on_record, tally)
        is_partial = False
        try:
            await (arm.closed_loop if spec.arrivals.kind is ArrivalKind.CLOSED else arm.open_loop)(schedule)
        except BaseExceptionGroup as group:  # all tasks fail alike, so one error is enough
            raise first_of(group) from None
        except asyncio.CancelledError:
            if not (spec.keeps_partial and tally.completed + tally.failed):
                raise
            is_partial = take_cancellation()
        duration_s = clock() - start_s
        return ArmRun(log.finish(), await schedule.planned(arm.begun), start_s, duration_s, is_partial)


def take_cancellation() -> bool:
    """Let the present task go on after a cancellation that it has caught. Return True."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    return True


class _Schedule:
    """Makes this worker's sessions with their start times, one at a time, and counts the requests of these sessions."""

    def __init__(self, workload: Workload, spec: RunSpec, start_s: float) -> None:
        self._workload = workload
        self._spec = spec
        self._start_s = start_s
        self._planned = 0
        self._sessions = self._draw()

    def next(self) -> tuple[float, Session] | None:
        """Return the next session and its start on the run's clock; None: no session is left. Raises ValueError if the
        session starts before the previous one."""
        return next(self._sessions, None)

    async def planned(self, begun: int) -> int:
        """Return the number of requests of all sessions, begun or not. If the number of sessions is open, return
        `begun`."""
        if self._spec.sessions is None and self._workload.length is None:
            return begun
        for count, _ in enumerate(self._sessions):
            if count % 256 == 255:
                await asyncio.sleep(0)  # many remaining sessions must not delay Ctrl-C
        return self._planned

    def _draw(self) -> Iterator[tuple[float, Session]]:
        spec = self._spec
        ends = [spec.first_session + spec.sessions if spec.sessions is not None else None, self._workload.length]
        end = min((end for end in ends if end is not None), default=None)
        numbers = itertools.count(spec.first_session) if end is None else range(spec.first_session, end)
        offsets = None if spec.arrivals.kind in _TIMELESS else start_times_s(spec.arrivals, spec.seed)
        first_s, last_s = None, 0.0
        for number in numbers:
            offset_s = next(offsets) if offsets else 0.0  # drawn for all workers' sessions, so times agree
            if first_s is None and spec.arrivals.kind is ArrivalKind.TRACE:
                # a block of a trace starts with its own first session, not with the trace's
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
    """Planned requests of the sessions that have begun."""
    unreached: int = 0
    """Requests that got no connection."""
    deadline_s: float = field(init=False)
    slots: asyncio.Semaphore | None = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.start_s + self.spec.time_limit_s
        caps = [self.spec.max_in_flight]
        if self.spec.arrivals.kind is ArrivalKind.CLOSED:
            caps.append(self.spec.arrivals.concurrency)  # without it, branches of one session would exceed the cap
        cap = min((cap for cap in caps if cap is not None), default=None)
        self.slots = None if cap is None else asyncio.Semaphore(cap)

    # -- starting sessions ---------------------------------------------------------------------------------------

    async def open_loop(self, schedule: _Schedule) -> None:
        """Start each session at its time, even if the server is slow."""
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
        """Let `concurrency` users play one session after another."""
        await asyncio.sleep(self.start_s - self.clock())

        async def user() -> None:
            while self.clock() < self.deadline_s and (drawn := schedule.next()) is not None:
                unreached = self.unreached
                async with asyncio.TaskGroup() as tasks:
                    self._start(drawn[1], self.clock(), tasks.create_task)
                if self.unreached > unreached:  # a request of this user, or of another to the same server
                    await asyncio.sleep(min(UNREACHED_S, max(0.0, self.deadline_s - self.clock())))

        async with asyncio.TaskGroup() as users:
            for _ in range(self.spec.arrivals.concurrency):
                users.create_task(user())

    # -- playing one session -------------------------------------------------------------------------------------

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
        """Play the turn and those that follow it. A failed turn ends its branch: there is no answer to continue
        from."""
        while intended_s <= self.deadline_s:
            call = call or self._call(session, turn, answers, intended_s)  # built during the pause, before it is due
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
        """Send the call; None: the run's time was up while the call waited for the cap on requests in flight."""
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
            self.unreached += record.failure == CONNECT
        self.log.add(record)
        if self.on_record is not None:
            self.on_record(record)
        return record


def _roots(session: Session) -> list[int]:
    return [number for number, turn in enumerate(session.turns) if turn.after < 0]
