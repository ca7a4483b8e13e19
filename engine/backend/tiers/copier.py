"""Copies asked for, in flight and finished: fences, batching, a bound on what is in flight, measured rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.backend.tiers.base import (
    BlockPair,
    BlockRun,
    CopyEngine,
    CopyError,
    Direction,
    FinishedCopy,
    RunningCopy,
)
from engine.backend.tiers.fences import Fences
from engine.backend.tiers.rates import CopyRate
from engine.backend.tiers.runs import batch

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Bounds per direction. Raises ValueError naming the field that is out of range."""

    run_bytes: int = 64 * _MIB
    """A run is split above this: what a cancelled copy must still wait for, and how finely time is measured."""
    in_flight_bytes: int = 1024 * _MIB
    """Bytes given to the engine and not finished. More than moves between two polls, or the link idles: PCIe 5 x16
    moves some 0.5 GB in a step of 10 ms."""
    half_life_bytes: int = 4096 * _MIB
    """Of the measured rates."""

    def __post_init__(self) -> None:
        for name in ("run_bytes", "in_flight_bytes", "half_life_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy from its request to its end."""

    copy_id: int
    direction: Direction
    pairs: Sequence[BlockPair]
    after_step: int
    unstarted: deque[BlockRun]
    running: int = 0
    done: list[BlockRun] = field(default_factory=list)
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return not self.unstarted and not self.running


@dataclass(frozen=True, slots=True)
class _InFlight:
    copy: _Copy
    run: BlockRun
    handle: RunningCopy


class _Lane:
    """One direction: copies whose steps have ended, oldest first, and the runs given to the engine."""

    def __init__(self, half_life_bytes: int) -> None:
        self.ready: deque[_Copy] = deque()
        self.in_flight: deque[_InFlight] = deque()
        self.in_flight_blocks = 0
        self.open_blocks = 0
        """Blocks asked for and not finished, in flight or not."""
        self.head_since_s = 0.0
        """When the oldest run in flight had the link to itself."""
        self.rate = CopyRate(half_life_bytes)


class BlockCopier:
    """Moves blocks between the pool and the host tier, beside the steps that compute.

    A copy and the steps are ordered by the host alone: a copy starts once the steps that its caller names have ended,
    and its blocks are fenced, from the request on, until `poll` has told its end. So no step is ever launched that
    would have to wait for a copy, and no copy reads what a step still writes.
    Not thread-safe: one thread calls it, and calls `poll` often enough (each step) to keep the link busy.
    """

    def __init__(self, engine: CopyEngine, clock: Callable[[], float], limits: CopyLimits | None = None) -> None:
        """`clock`: seconds that only grow, as of `time.monotonic`."""
        self._engine = engine
        self._clock = clock
        self._limits = limits or CopyLimits()
        self._lanes = {direction: _Lane(self._limits.half_life_bytes) for direction in Direction}
        self._held: list[_Copy] = []
        """Copies that wait for a step to end."""
        self._open: dict[int, _Copy] = {}
        self._next_id = 0
        self._ended_step = 0
        self.fences = Fences(engine.pool_blocks, engine.host_slots)

    @property
    def open_copies(self) -> int:
        """Copies whose end `poll` has not told yet."""
        return len(self._open)

    def in_flight_bytes(self, direction: Direction) -> int:
        """Bytes given to the engine and not finished."""
        return self._lanes[direction].in_flight_blocks * self._engine.block_bytes

    def demote(self, pairs: Sequence[BlockPair], *, after_step: int = 0) -> int:
        """Copy pool blocks to host slots; the copy's id. Not before step `after_step`, the last that writes one of the
        blocks, has ended. Raises FenceError, and ValueError for no pairs at all."""
        return self._request(Direction.DEMOTE, pairs, after_step)

    def promote(self, pairs: Sequence[BlockPair], *, after_step: int = 0) -> int:
        """Copy host slots to pool blocks; the copy's id. Not before step `after_step`, the last that reads or writes
        one of the blocks, has ended. Raises FenceError, and ValueError for no pairs at all."""
        return self._request(Direction.PROMOTE, pairs, after_step)

    def cancel(self, copy_id: int) -> None:
        """Start no further run of the copy. It ends, and its fences with it, once its runs in flight have."""
        copy = self._open[copy_id]
        dropped = sum(run.blocks for run in copy.unstarted)
        copy.unstarted.clear()
        self._lanes[copy.direction].open_blocks -= dropped

    def cancel_all(self, direction: Direction) -> None:
        """`cancel` every copy of this direction."""
        for copy in self._open.values():
            if copy.direction is direction and copy.unstarted:
                self.cancel(copy.copy_id)

    def open_blocks(self, direction: Direction) -> int:
        """Blocks asked for and not finished, in flight or not."""
        return self._lanes[direction].open_blocks

    def step_ended(self, step: int) -> None:
        """All steps up to this number have ended on the device. Steps are numbered from 1 in the order of launch."""
        self._ended_step = max(self._ended_step, step)
        held, self._held = self._held, []
        for copy in held:
            self._enqueue(copy)
        self._start_runs()

    def poll(self) -> list[FinishedCopy]:
        """Copies that have ended since the last call, whose fences fall now; starts further runs. Never waits."""
        for lane in self._lanes.values():
            self._collect(lane)
        self._start_runs()
        finished = [copy for copy in self._open.values() if copy.is_over]
        for copy in finished:
            del self._open[copy.copy_id]
            self.fences.close(copy.direction, copy.pairs)
        return [_outcome(copy) for copy in finished]

    def bytes_per_s(self, direction: Direction) -> float | None:
        """The measured rate, lower where the run in flight takes longer than it; None before the first run has ended"""
        lane = self._lanes[direction]
        if not lane.in_flight:
            return lane.rate.bytes_per_s()
        open_bytes = lane.in_flight[0].run.blocks * self._engine.block_bytes
        return lane.rate.bytes_per_s(open_bytes, self._clock() - lane.head_since_s)

    def learn_rate(self, direction: Direction, moved_bytes: int, elapsed_s: float) -> None:
        """What is known of the rate without a copy: so many bytes took so long."""
        self._lanes[direction].rate.observe(moved_bytes, elapsed_s)

    def seconds_for(self, direction: Direction, blocks: int) -> float | None:
        """Seconds until so many further blocks would have moved, behind those asked for already; None: not known."""
        rate = self.bytes_per_s(direction)
        if rate is None:
            return None
        return (self._lanes[direction].open_blocks + blocks) * self._engine.block_bytes / rate

    def _request(self, direction: Direction, pairs: Sequence[BlockPair], after_step: int) -> int:
        if not pairs:
            raise ValueError(f"a {direction.value} needs at least one block")
        self.fences.open(direction, pairs)
        self._next_id += 1
        runs = batch(direction, pairs, max(1, self._limits.run_bytes // self._engine.block_bytes))
        copy = _Copy(self._next_id, direction, tuple(pairs), after_step, deque(runs))
        self._open[copy.copy_id] = copy
        self._lanes[direction].open_blocks += len(pairs)
        self._enqueue(copy)
        self._start_runs()
        return copy.copy_id

    def _enqueue(self, copy: _Copy) -> None:
        """Copies whose steps have ended overtake those whose have not: their fences keep them apart."""
        if copy.after_step <= self._ended_step:
            self._lanes[copy.direction].ready.append(copy)
        else:
            self._held.append(copy)

    def _start_runs(self) -> None:
        for lane in self._lanes.values():
            while lane.ready:
                copy = lane.ready[0]
                if not copy.unstarted:
                    lane.ready.popleft()
                elif self._fits(lane, copy.unstarted[0]):
                    self._start(lane, copy, copy.unstarted.popleft())
                else:
                    break

    def _fits(self, lane: _Lane, run: BlockRun) -> bool:
        """Within the bound; a single run always is, however large a block."""
        in_flight_bytes = (lane.in_flight_blocks + run.blocks) * self._engine.block_bytes
        return not lane.in_flight or in_flight_bytes <= self._limits.in_flight_bytes

    def _start(self, lane: _Lane, copy: _Copy, run: BlockRun) -> None:
        try:
            handle = self._engine.start(run)
        except CopyError as error:
            copy.error = str(error)
            lane.open_blocks -= run.blocks
            return
        if not lane.in_flight:
            lane.head_since_s = self._clock()
        lane.in_flight.append(_InFlight(copy, run, handle))
        lane.in_flight_blocks += run.blocks
        copy.running += 1

    def _collect(self, lane: _Lane) -> None:
        still: deque[_InFlight] = deque()
        for flying in lane.in_flight:
            try:
                elapsed_s = flying.handle.elapsed_s()
            except CopyError as error:
                flying.copy.error = str(error)
            else:
                if elapsed_s is None:
                    still.append(flying)
                    continue
                lane.rate.observe(flying.run.blocks * self._engine.block_bytes, elapsed_s)
                flying.copy.done.append(flying.run)
            flying.copy.running -= 1
            lane.in_flight_blocks -= flying.run.blocks
            lane.open_blocks -= flying.run.blocks
        if still and still[0] is not lane.in_flight[0]:
            lane.head_since_s = self._clock()
        lane.in_flight = still


def _outcome(copy: _Copy) -> FinishedCopy:
    done: Sequence[BlockPair] = copy.pairs
    dropped: Sequence[BlockPair] = ()
    if sum(run.blocks for run in copy.done) < len(copy.pairs):
        moved = {pair for run in copy.done for pair in run.pairs}
        done = tuple(pair for pair in copy.pairs if pair in moved)
        dropped = tuple(pair for pair in copy.pairs if pair not in moved)
    return FinishedCopy(copy.copy_id, copy.direction, done, dropped, copy.error)
