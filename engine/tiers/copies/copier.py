"""Manages copies from request to end: fences, batching, a bound on the bytes in flight, measured rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from engine.tiers.copies.base import (
    BlockPair,
    BlockRun,
    CopyEngine,
    CopyError,
    Direction,
    EndedJob,
    FinishedCopy,
    RunningJob,
)
from engine.tiers.copies.fences import Fences
from engine.tiers.copies.rates import CopyRate
from engine.tiers.copies.runs import batch, jobs

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Bounds per direction. Raises ValueError naming the field that is out of range."""

    job_bytes: int = 64 * _MIB
    """Largest job: a cancelled copy must still wait for its jobs in flight, and each job is one measurement of time."""
    in_flight_bytes: int = 1024 * _MIB
    """Bytes given to the engine and not finished. The link idles if it moves more than this between two polls: PCIe 5
    x16 moves some 0.5 GB in a step of 10 ms."""
    half_life_bytes: int = 4096 * _MIB
    """Half-life of the measured rates."""

    def __post_init__(self) -> None:
        for name in ("job_bytes", "in_flight_bytes", "half_life_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


Job = Sequence[BlockRun]
"""Some runs of one copy, which the copy engine gets at once."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy from its request to its end."""

    copy_id: int
    direction: Direction
    pairs: Sequence[BlockPair]
    after_step: int
    unstarted: deque[Job]
    unstarted_blocks: int
    running: int = 0
    done: list[BlockRun] = field(default_factory=list)
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return not self.unstarted and not self.running


@dataclass(frozen=True, slots=True)
class _InFlight:
    copy: _Copy
    job: Job
    blocks: int
    handle: RunningJob


class _Lane:
    """One direction: copies whose steps have ended, oldest first, and the jobs given to the engine."""

    def __init__(self, half_life_bytes: int) -> None:
        self.ready: deque[_Copy] = deque()
        self.in_flight: deque[_InFlight] = deque()
        self.in_flight_blocks = 0
        self.open_blocks = 0
        """Blocks requested and not finished, in flight or not."""
        self.head_since_s = 0.0
        """When the oldest job in flight became the oldest."""
        self.rate = CopyRate(half_life_bytes)


class BlockCopier:
    """Moves blocks between the pool and the host tier, in parallel with the steps.

    Only the host orders copies and steps. A copy starts when the steps that its caller names have ended, and its blocks
    are fenced from the request until `poll` has reported its end. So no launched step has to wait for a copy, and no
    copy reads blocks that a step still writes.
    Not thread-safe: one thread calls it, and calls `poll` often enough (each step) to keep the link busy.
    """

    def __init__(self, engine: CopyEngine, clock: Callable[[], float], limits: CopyLimits | None = None) -> None:
        """`clock`: returns seconds that never decrease, like `time.monotonic`."""
        self._engine = engine
        self._clock = clock
        self._limits = limits or CopyLimits()
        self._lanes = {direction: _Lane(self._limits.half_life_bytes) for direction in Direction}
        self._held: list[_Copy] = []
        """Copies that wait for a step to end."""
        self._open: dict[int, _Copy] = {}
        self._over: dict[int, _Copy] = {}
        """Copies that have ended since the last `poll`."""
        self._next_id = 0
        self._ended_step = 0
        self.fences = Fences(engine.pool_blocks, engine.host_slots)

    @property
    def open_copies(self) -> int:
        """Number of copies whose end `poll` has not reported yet."""
        return len(self._open)

    def in_flight_bytes(self, direction: Direction) -> int:
        """Return the bytes given to the engine and not finished."""
        return self._lanes[direction].in_flight_blocks * self._engine.block_bytes

    def demote(self, pairs: Sequence[BlockPair], *, after_step: int = 0) -> int:
        """Copy pool blocks to host slots; return the copy's id. The copy waits until step `after_step`, the last that
        writes one of the blocks, has ended. Raises FenceError, and ValueError if there are no pairs."""
        return self._request(Direction.DEMOTE, pairs, after_step)

    def promote(self, pairs: Sequence[BlockPair], *, after_step: int = 0) -> int:
        """Copy host slots to pool blocks; return the copy's id. The copy waits until step `after_step`, the last that
        reads or writes one of the blocks, has ended. Raises FenceError, and ValueError if there are no pairs."""
        return self._request(Direction.PROMOTE, pairs, after_step)

    def cancel(self, copy_id: int) -> None:
        """Start no further job of the copy. The copy and its fences end when its jobs in flight have ended."""
        copy = self._open[copy_id]
        copy.unstarted.clear()
        self._lanes[copy.direction].open_blocks -= copy.unstarted_blocks
        copy.unstarted_blocks = 0
        self._look_whether_over(copy)

    def cancel_all(self, direction: Direction) -> None:
        """`cancel` every copy of this direction."""
        for copy in self._open.values():
            if copy.direction is direction and copy.unstarted:
                self.cancel(copy.copy_id)

    def open_blocks(self, direction: Direction) -> int:
        """Return the number of blocks requested and not finished, in flight or not."""
        return self._lanes[direction].open_blocks

    def step_ended(self, step: int) -> None:
        """Record that all steps up to this number have ended on the device. Steps are numbered from 1 by launch."""
        self._ended_step = max(self._ended_step, step)
        held, self._held = self._held, []
        for copy in held:
            self._enqueue(copy)
        self._start_jobs()

    def poll(self) -> list[FinishedCopy]:
        """Return the copies that ended since the last call, and drop their fences. Starts further jobs. Never waits."""
        for lane in self._lanes.values():
            self._collect(lane)
        self._start_jobs()
        finished, self._over = sorted(self._over.items()), {}  # open copies are not walked: there may be hundreds
        for copy_id, copy in finished:
            del self._open[copy_id]
            self.fences.close(copy.direction, copy.pairs)
        return [_outcome(copy) for _, copy in finished]

    def bytes_per_s(self, direction: Direction) -> float | None:
        """Return the measured rate, None before the first job has ended. A job in flight that is slower lowers it."""
        lane = self._lanes[direction]
        if not lane.in_flight:
            return lane.rate.bytes_per_s()
        open_bytes = lane.in_flight[0].blocks * self._engine.block_bytes
        return lane.rate.bytes_per_s(open_bytes, self._clock() - lane.head_since_s)

    def learn_rate(self, direction: Direction, moved_bytes: int, elapsed_s: float) -> None:
        """Add a measurement of the rate from outside: `moved_bytes` took `elapsed_s` seconds."""
        self._lanes[direction].rate.observe(moved_bytes, elapsed_s)

    def seconds_for(self, direction: Direction, blocks: int) -> float | None:
        """Return the seconds until this many more blocks would have moved, after those requested; None if unknown."""
        rate = self.bytes_per_s(direction)
        if rate is None:
            return None
        return (self._lanes[direction].open_blocks + blocks) * self._engine.block_bytes / rate

    def seconds_until(self, direction: Direction, copy_ids: Container[int]) -> float:
        """Return the seconds until the last of these copies has ended; 0 if none is open or the rate is unknown. Copies
        that wait for a step are not counted."""
        lane, rate = self._lanes[direction], self.bytes_per_s(direction)
        ahead = last = 0
        for flying in lane.in_flight:
            ahead += flying.blocks
            if flying.copy.copy_id in copy_ids:
                last = ahead
        for copy in lane.ready:
            ahead += copy.unstarted_blocks
            if copy.unstarted and copy.copy_id in copy_ids:
                last = ahead
        return last * self._engine.block_bytes / rate if rate else 0.0

    def _request(self, direction: Direction, pairs: Sequence[BlockPair], after_step: int) -> int:
        if not pairs:
            raise ValueError(f"a {direction.value} needs at least one block")
        self.fences.open(direction, pairs)
        self._next_id += 1
        most = max(1, self._limits.job_bytes // self._engine.block_bytes)
        unstarted = deque(jobs(batch(direction, pairs, most), most))
        copy = _Copy(self._next_id, direction, tuple(pairs), after_step, unstarted, len(pairs))
        self._open[copy.copy_id] = copy
        self._lanes[direction].open_blocks += len(pairs)
        self._enqueue(copy)
        self._start_jobs()
        return copy.copy_id

    def _enqueue(self, copy: _Copy) -> None:
        """Queue a copy. It may overtake copies that wait for a step, because fences keep their blocks apart."""
        if copy.after_step <= self._ended_step:
            self._lanes[copy.direction].ready.append(copy)
        else:
            self._held.append(copy)

    def _start_jobs(self) -> None:
        for lane in self._lanes.values():
            while lane.ready:
                copy = lane.ready[0]
                if not copy.unstarted:
                    lane.ready.popleft()
                else:
                    job = copy.unstarted[0]
                    blocks = sum(run.blocks for run in job)
                    if not self._fits(lane, blocks):
                        break
                    copy.unstarted.popleft()
                    copy.unstarted_blocks -= blocks
                    self._start(lane, copy, job, blocks)

    def _fits(self, lane: _Lane, blocks: int) -> bool:
        """Return whether a further job of this many blocks is within the bound. With none in flight, any size fits."""
        in_flight_bytes = (lane.in_flight_blocks + blocks) * self._engine.block_bytes
        return not lane.in_flight or in_flight_bytes <= self._limits.in_flight_bytes

    def _start(self, lane: _Lane, copy: _Copy, job: Job, blocks: int) -> None:
        try:
            handle = self._engine.start(job)
        except CopyError as error:
            copy.error = str(error)
            lane.open_blocks -= blocks
            self._look_whether_over(copy)
            return
        if not lane.in_flight:
            lane.head_since_s = self._clock()
        lane.in_flight.append(_InFlight(copy, job, blocks, handle))
        lane.in_flight_blocks += blocks
        copy.running += 1

    def _look_whether_over(self, copy: _Copy) -> None:
        if copy.is_over:
            self._over[copy.copy_id] = copy

    def _collect(self, lane: _Lane) -> None:
        still: deque[_InFlight] = deque()
        for flying in lane.in_flight:
            ended = flying.handle.ended()
            if ended is None:
                still.append(flying)
                continue
            lane.rate.observe(ended.moved.blocks * self._engine.block_bytes, ended.moved.seconds)
            _note(flying.copy, flying.job, ended)
            self._look_whether_over(flying.copy)
            lane.in_flight_blocks -= flying.blocks
            lane.open_blocks -= flying.blocks
        if still and still[0] is not lane.in_flight[0]:
            lane.head_since_s = self._clock()
        lane.in_flight = still


def _note(copy: _Copy, job: Job, ended: EndedJob) -> None:
    """Note that one of the copy's jobs has ended."""
    copy.running -= 1
    if not ended.errors:
        copy.done.extend(job)
        return
    for run, error in zip(job, ended.errors, strict=True):
        if error is None:
            copy.done.append(run)
        else:
            copy.error = error


def _outcome(copy: _Copy) -> FinishedCopy:
    done: Sequence[BlockPair] = copy.pairs
    dropped: Sequence[BlockPair] = ()
    if sum(run.blocks for run in copy.done) < len(copy.pairs):
        moved = {pair for run in copy.done for pair in run.pairs}
        done = tuple(pair for pair in copy.pairs if pair in moved)
        dropped = tuple(pair for pair in copy.pairs if pair not in moved)
    return FinishedCopy(copy.copy_id, copy.direction, done, dropped, copy.error)
