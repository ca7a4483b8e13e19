"""Copies on threads: a copy wakes its thread once and reports once, however many runs it has."""

from __future__ import annotations

import time
from contextlib import closing
from queue import SimpleQueue

from engine.tiers.copies.base import BlockPair, BlockRun, CopyError, Direction, Moved
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.stores.threads import ThreadedCopies


class Mover:
    """Moves nothing. It fails where a test says so, as files and memory do, or in an unexpected way."""

    block_bytes, pool_blocks, host_slots = 10, 64, 64

    def __init__(self) -> None:
        self.moved: list[BlockRun] = []
        self.errors: dict[int, Exception] = {}

    def move(self, run: BlockRun) -> Moved:
        if (error := self.errors.get(run.source)) is not None:
            raise error
        self.moved.append(run)
        return Moved(run.blocks, 0.5 * run.blocks)


SCATTERED = [BlockPair(2 * i, 3 * i) for i in range(16)]


def test_a_copy_of_many_runs_reports_once() -> None:
    mover = Mover()
    ends: SimpleQueue[None] = SimpleQueue()
    with closing(ThreadedCopies(mover, "test")) as copies:
        copies.tell(lambda: ends.put(None))
        copier = BlockCopier(copies, time.monotonic)
        copier.demote(SCATTERED)
        ends.get(timeout=60)
        (finished,) = copier.poll()
        copier.demote(SCATTERED[:1])
        ends.get(timeout=60)
    assert finished.done == tuple(SCATTERED)
    assert len(mover.moved) == len(SCATTERED) + 1
    assert ends.empty(), "the first copy reported once"
    assert copier.bytes_per_s(Direction.DEMOTE) == 20


def test_a_run_that_fails_is_dropped_and_the_others_move() -> None:
    mover = Mover()
    mover.errors = {4: CopyError("damaged"), 6: MemoryError("none left")}
    ends: SimpleQueue[None] = SimpleQueue()
    with closing(ThreadedCopies(mover, "test")) as copies:
        copies.tell(lambda: ends.put(None))
        copier = BlockCopier(copies, time.monotonic)
        copier.promote(SCATTERED)
        ends.get(timeout=60)
        (finished,) = copier.poll()
        mover.errors.clear()
        copier.promote(SCATTERED)
        ends.get(timeout=60)
        (again,) = copier.poll()
    assert finished.dropped == (SCATTERED[2], SCATTERED[3])
    assert finished.error == "MemoryError: none left"
    assert (again.dropped, again.error) == ((), None), "the thread goes on"
