"""Runs steps on a device, in rounds, and keeps the shortest time of each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.backend.base import Backend
from engine.backend.calibration.fit import Measured
from engine.backend.calibration.shapes import Limits, Shape, drawn, grid, growing_decodes, growing_prefills, step_plan
from engine.sched.plan import StepPlan

RANDOM = 36
"""Steps of random size: half of them for the fit, half held out."""
MIN_ROUNDS, MAX_ROUNDS = 3, 30
TRIES = 3
"""Tries of a step that seems to take too long."""
LARGEST_STEP = 1 / 100
"""Longest step, as a share of the time for measuring. Most steps are far shorter, so there is time to run some 50
shapes three times."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steps to fit to, steps to check with, and how steady the machine was."""

    fitted: Sequence[tuple[Shape, Measured]]
    held_out: Sequence[tuple[Shape, Measured]]
    rounds: int
    spread: float
    """Median over the steps of (median repeat / shortest repeat - 1)."""


async def measure(
    backend: Backend, limits: Limits, seconds: float, seed: int, say: Callable[[str], None]
) -> Measurement:
    """Measure for about `seconds`. Repeats of a step are spread over the whole time. The shortest counts, because other
    load can only lengthen a step."""
    bench = _Bench(backend, limits, seed)
    start_s = time.monotonic()
    limits = await _bearable(bench, limits, seconds * LARGEST_STEP)
    chosen = drawn(limits, RANDOM, seed)
    fitted = [*grid(limits), *chosen[: RANDOM // 2]]
    held_out = [shape for shape in chosen[RANDOM // 2 :] if shape not in fitted]
    shapes = list(dict.fromkeys((*fitted, *held_out)))
    say(f"{len(shapes)} steps of at most {limits.step_tokens} tokens computed and {limits.context} of context each")
    times_s: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    rounds = 0
    while rounds < MAX_ROUNDS and (rounds < MIN_ROUNDS or time.monotonic() - start_s < seconds):
        for shape in shapes:
            times_s[shape].append(await bench.step_s(shape))
        rounds += 1
        say(f"round {rounds}, {time.monotonic() - start_s:.0f} s")
    found = {shape: Measured(bench.plan(shape), min(times)) for shape, times in times_s.items()}
    spread = statistics.median(statistics.median(times) / min(times) - 1 for times in times_s.values())
    return Measurement([(s, found[s]) for s in fitted], [(s, found[s]) for s in held_out], rounds, spread)


class _Bench:
    """Runs steps on blocks in random order, as in a pool in use."""

    def __init__(self, backend: Backend, limits: Limits, seed: int) -> None:
        self._backend = backend
        self._block_size = limits.block_size
        self._blocks = list(range(limits.blocks))
        random.Random(seed).shuffle(self._blocks)

    def plan(self, shape: Shape) -> StepPlan:
        return step_plan(shape, self._blocks, self._block_size)

    async def step_s(self, shape: Shape) -> float:
        """Return the step's seconds on the device."""
        return (await self._backend.run(self.plan(shape))).elapsed_s


async def _bearable(bench: _Bench, limits: Limits, largest_s: float) -> Limits:
    """Return limits within which a step takes at most about `largest_s` seconds. This also warms the device up."""
    prefill = await _largest(bench, growing_prefills(limits), largest_s)
    decode = await _largest(bench, growing_decodes(limits), largest_s)
    size = limits.block_size
    blocks = -(-prefill.chunk // size) + decode.decodes * -(-decode.context // size)
    return replace(
        limits,
        step_tokens=min(limits.step_tokens, max(prefill.chunk, decode.decodes)),
        blocks=min(limits.blocks, blocks),
    )


async def _largest(bench: _Bench, shapes: Iterator[Shape], largest_s: float) -> Shape:
    """Run these growing steps until one takes longer than `largest_s`. Return the step before that one. The first step
    is always accepted."""
    best = next(shapes, None)
    if best is None:
        raise ValueError("the KV pool or the model's context is too small to calibrate with: 32 tokens are needed")
    await bench.step_s(best)
    for shape in shapes:
        await bench.step_s(shape)  # the first step of a size allocates memory
        if not await _is_within(bench, shape, largest_s):
            break
        best = shape
    return best


async def _is_within(bench: _Bench, shape: Shape, largest_s: float) -> bool:
    """Return whether one of a few tries of the step takes at most `largest_s`: other load may delay single tries."""
    for _ in range(TRIES):
        if await bench.step_s(shape) <= largest_s:
            return True
    return False
