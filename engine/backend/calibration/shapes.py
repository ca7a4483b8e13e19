"""Makes steps of chosen sizes without the scheduler."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.sched.plan import SequenceChunk, StepPlan
from engine.sched.request import Request

_CHUNKS = (16, 64, 256, 1024, 2048, 4096, 8192)
_BATCHES = (1, 4, 16, 64, 256)
_CONTEXTS = (32, 256, 1024, 4096, 16384)
_TRIES = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """One step: a prefill chunk, decodes, or both."""

    cached: int = 0
    """Tokens before the chunk, already in the KV pool."""
    chunk: int = 0
    """Tokens of the chunk; 0: no prefill."""
    decodes: int = 0
    """Sequences that decode."""
    context: int = 0
    """Tokens that each decoding sequence attends to, its own token included."""

    def __str__(self) -> str:
        prefill = f"prefill {self.chunk} after {self.cached}" if self.chunk else ""
        decode = f"decode {self.decodes} x {self.context}" if self.decodes else ""
        return " + ".join(filter(None, (prefill, decode)))


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes of steps."""

    step_tokens: int
    """Tokens computed in a step."""
    decodes: int
    """Decoding sequences in a step."""
    context: int
    """Tokens of a sequence."""
    blocks: int
    """Blocks that all sequences of a step together may fill."""
    block_size: int
    """Tokens of a block."""

    def hold(self, shape: Shape) -> bool:
        """Return whether the step is within the limits."""
        size = self.block_size
        blocks = -(-(shape.cached + shape.chunk) // size) + shape.decodes * -(-shape.context // size)
        return (
            shape.chunk + shape.decodes <= self.step_tokens
            and shape.decodes <= self.decodes
            and max(shape.cached + shape.chunk, shape.context) <= self.context
            and blocks <= self.blocks
        )


def growing_prefills(limits: Limits) -> Iterator[Shape]:
    """Yield prefills without cached tokens, each twice as long as the one before."""
    sizes = (2**i for i in range(4, 30))
    return itertools.takewhile(limits.hold, (Shape(chunk=size) for size in sizes))


def growing_decodes(limits: Limits) -> Iterator[Shape]:
    """Yield decodes, each with twice as many tokens of context in all as the one before."""
    tokens = (2**i for i in range(5, 40))
    shapes = (Shape(decodes=n, context=size // n) for size in tokens for n in [min(limits.decodes, size // 32)])
    return itertools.takewhile(limits.hold, shapes)


def grid(limits: Limits) -> list[Shape]:
    """Return the steps for the fit: prefill chunks after cached prefixes, decode batches, and some steps with both."""
    cached = (0, *_CONTEXTS[1:])
    prefills = [Shape(cached=p, chunk=t) for t in _CHUNKS for p in cached]
    decodes = [Shape(decodes=n, context=c) for n in _BATCHES for c in _CONTEXTS]
    mixed = [Shape(chunk=t, decodes=n, context=256) for t in (64, 1024) for n in (4, 16)]
    return [shape for shape in (*prefills, *decodes, *mixed) if limits.hold(shape)]


def drawn(limits: Limits, count: int, seed: int) -> list[Shape]:
    """Return random steps within the limits, with log-uniform sizes: prefills, decodes and both in turn."""
    generator = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(math.exp(generator.uniform(math.log(low), math.log(max(low, high)))))

    found: list[Shape] = []
    for number in range(_TRIES):
        if len(found) == count:
            break
        kind = number % 3
        cached = between(1, limits.context) - 1
        prefill = (cached, between(8, limits.step_tokens)) if kind != 1 else (0, 0)
        decode = (between(1, limits.decodes), between(8, limits.context)) if kind != 0 else (0, 0)
        shape = Shape(*prefill, *decode)
        if limits.hold(shape):
            found.append(shape)
    return found


def step_plan(shape: Shape, blocks: Sequence[int], block_size: int) -> StepPlan:
    """Return the step. Its sequences take `blocks` from the first on and share none."""
    free = iter(blocks)

    def sequence(number: int, start: int, tokens: int) -> SequenceChunk:
        ids = [1] * (start + tokens)
        own = list(itertools.islice(free, -(-len(ids) // block_size)))
        return SequenceChunk(
            Request(number, ids, max_tokens=1), start, ids[start:], own, samples=True, decodes=number > 0
        )

    chunks = [sequence(0, shape.cached, shape.chunk)] if shape.chunk else []
    chunks += [sequence(1 + i, shape.context - 1, 1) for i in range(shape.decodes)]
    return StepPlan(tuple(chunks))
