"""How much longer steps of other requests take while blocks are copied to and from host memory, on the CPU.

    python -m tests.bench.engine.bench_tier_steps [--rounds 24] [--steps 8]

The bench uses real KV and the engine's own host tier with its threads. As in the engine, a thread computes steps, and
the event loop meanwhile asks for copies and polls for their ends. A step decodes 8 sequences of 512 tokens. A round is
a few steps without copies, as many during copies, and as many without copies again; the order alternates. Copies are
pieces of 32 blocks that are not adjacent in memory, as in a pool that has been in use for some time. An engine under
load copies a piece about every eighth step (`bench_tier_traffic`). Here every step has one piece, or four: two in each
direction.

`step, CPU`: CPU time of the thread that computes, which includes waits for memory that copies keep busy. `step, clock`:
clock time of the same steps, which also includes waits for the interpreter's lock and for other programs. Copies run on
another core. The lower quartile of each set of steps counts, because other programs only make steps longer. A ratio is
the median of the rounds, with its interquartile range. `asking`: CPU time of the event loop for the copies of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.backend.host_tier import cpu_host_store
from engine.backend.torch_backend import TorchBackend
from engine.model.checkpoint import make_checkpoint
from engine.model.decoder import load_decoder
from engine.sched.plan import SequenceChunk
from engine.tiers.copies.base import BlockPair
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.stores.store import Store
from tests.bench.engine.bench_exact import BLOCK_SIZE, decodes

POOL_BLOCKS, HOST_BLOCKS = 1200, 1200
SEQUENCES, CONTEXT = 8, 512
PIECE_BLOCKS = 32
PIECES = (1, 4)
"""Pieces that are copied during each step."""


class Traffic:
    """Copies blocks that no step uses, down and up in turn."""

    def __init__(self, copier: BlockCopier, first: int) -> None:
        """`first`: first block of the pool that no step uses."""
        rng = random.Random(1)
        self.copier = copier
        self.blocks = rng.sample(range(first, POOL_BLOCKS), 4 * PIECE_BLOCKS)
        self.slots = rng.sample(range(HOST_BLOCKS), 4 * PIECE_BLOCKS)
        self.moved = self.asked = 0
        self.ended = asyncio.Event()
        """Set when the copier has been polled for copies that have ended."""
        self.spent_s = 0.0
        """CPU seconds of the event loop."""

    def ask(self, pieces: int) -> None:
        """Ask for `pieces` pieces. Unfinished pieces of the previous step count among them."""
        start_s = time.thread_time()
        for _ in range(pieces - self.copier.open_copies):
            at = self.asked % 4 * PIECE_BLOCKS
            places = zip(self.blocks[at : at + PIECE_BLOCKS], self.slots[at : at + PIECE_BLOCKS], strict=True)
            if self.asked % 2:
                self.copier.promote([BlockPair(slot, block) for block, slot in places])
            else:
                self.copier.demote([BlockPair(block, slot) for block, slot in places])
            self.asked += 1
        self.spent_s += time.thread_time() - start_s

    def take_in(self) -> None:
        """Poll the copier for copies that have ended."""
        start_s = time.thread_time()
        self.moved += sum(len(end.done) for end in self.copier.poll())
        self.spent_s += time.thread_time() - start_s
        self.ended.set()


@dataclass
class Timed:
    """Seconds of some steps."""

    cpu_s: list[float] = field(default_factory=list)
    clock_s: list[float] = field(default_factory=list)
    asking_s: list[float] = field(default_factory=list)

    def least(self) -> tuple[float, float]:
        """Return the lower quartiles: CPU and clock seconds of a step."""
        return statistics.quantiles(self.cpu_s, n=4)[0], statistics.quantiles(self.clock_s, n=4)[0]


@dataclass
class Arm:
    """The rounds with one amount of traffic."""

    alone: list[tuple[float, float]] = field(default_factory=list)
    ratios: list[tuple[float, float]] = field(default_factory=list)
    again: list[tuple[float, float]] = field(default_factory=list)
    asking_s: list[float] = field(default_factory=list)


class Bench:
    """The steps, and the traffic during them."""

    def __init__(self, backend: TorchBackend, store: Store, thread: ThreadPoolExecutor) -> None:
        ids = np.random.default_rng(1).integers(0, 200, CONTEXT + 1).tolist()
        self._chunks: Sequence[SequenceChunk] = decodes(ids, [CONTEXT] * SEQUENCES)
        self._backend, self._store, self._thread = backend, store, thread
        self.traffic = Traffic(store.copier, SEQUENCES * (CONTEXT // BLOCK_SIZE + 1))

    @torch.inference_mode()
    def _step(self) -> tuple[float, float]:
        cpu_s, clock_s = time.thread_time(), time.perf_counter()
        self._backend.logits(tuple(self._chunks))
        return time.thread_time() - cpu_s, time.perf_counter() - clock_s

    async def timed(self, steps: int, pieces: int) -> Timed:
        """Run steps, each while `pieces` pieces are copied."""
        loop, found, traffic = asyncio.get_running_loop(), Timed(), self.traffic

        def on_end() -> None:
            loop.call_soon_threadsafe(traffic.take_in)

        assert self._store.telling is not None
        self._store.telling.tell(on_end)
        for _ in range(steps):
            before_s = traffic.spent_s
            step = loop.run_in_executor(self._thread, self._step)
            if pieces:
                traffic.ask(pieces)
            cpu_s, clock_s = await step
            found.cpu_s.append(cpu_s)
            found.clock_s.append(clock_s)
            found.asking_s.append(traffic.spent_s - before_s)
        while traffic.copier.open_copies:
            traffic.ended.clear()
            await traffic.ended.wait()
        return found

    async def round(self, arm: Arm, pieces: int, steps: int, *, copies_first: bool) -> None:
        """Add a round."""
        first = await self.timed(steps, pieces if copies_first else 0)
        second = await self.timed(steps, 0 if copies_first else pieces)
        again = (await self.timed(steps, 0)).least()
        beside, alone = (first, second.least()) if copies_first else (second, first.least())
        arm.alone.append(alone)
        arm.asking_s.append(statistics.median(beside.asking_s))
        mean = [(a + b) / 2 for a, b in zip(alone, again, strict=True)]
        cpu_s, clock_s = beside.least()
        arm.ratios.append((cpu_s / mean[0], clock_s / mean[1]))
        arm.again.append((again[0] / alone[0], again[1] / alone[1]))


async def measure(bench: Bench, rounds: int, steps: int) -> dict[int, Arm]:
    """Return the arms by their pieces."""
    arms = {pieces: Arm() for pieces in PIECES}
    await bench.timed(steps, 1)
    for number in range(rounds):
        for pieces, arm in arms.items():
            await bench.round(arm, pieces, steps, copies_first=bool(number % 2))
    return arms


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="steps of each kind in a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        backend = TorchBackend(load_decoder(folder), block_count=POOL_BLOCKS, block_size=BLOCK_SIZE)
    store = cpu_host_store(backend.pool, HOST_BLOCKS * backend.pool.data[0].nbytes)
    with ThreadPoolExecutor(1) as thread:
        bench = Bench(backend, store, thread)
        arms = asyncio.run(measure(bench, args.rounds, args.steps))
    store.close()
    print(f"{args.rounds} rounds of {args.steps} steps; blocks of {store.block_bytes >> 10} KiB\n")
    print("| blocks beside a step | step alone, ms | step, CPU | without again | step, clock | again | asking, ms |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for pieces, arm in arms.items():
        cells = [str(pieces * PIECE_BLOCKS), f"{1e3 * statistics.median(alone[0] for alone in arm.alone):.2f}"]
        for column in (0, 1):
            low, middle, high = statistics.quantiles([ratio[column] for ratio in arm.ratios], n=4)
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
            cells.append(f"{statistics.median(ratio[column] for ratio in arm.again):.3f}")
        print("| " + " | ".join([*cells, f"{1e3 * statistics.median(arm.asking_s):.3f}"]) + " |")


if __name__ == "__main__":
    main()
