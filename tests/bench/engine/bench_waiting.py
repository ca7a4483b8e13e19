"""The cost of planning a step while a long prompt waits for room, by index.

    python -m tests.bench.engine.bench_waiting [--tokens 140000] [--steps 150]

The pool holds nearly all of the prompt's tokens and is otherwise idle, and ten requests decode. The prompt needs more
blocks than these requests leave. The figure is the CPU time of `Scheduler.schedule`, without a model: the median and
the maximum over the steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.sched.plan import SampledToken, StepResult
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig

BLOCK, DECODING, SHORT = 16, 10, 1600
_VOCABULARY = 100_000


def step(scheduler: Scheduler, rng: random.Random) -> float:
    """Run one step; return the CPU seconds of its planning."""
    start_s = time.thread_time()
    plan = scheduler.schedule()
    planned_s = time.thread_time() - start_s
    assert plan is not None
    tokens = {chunk.request.id: SampledToken(rng.randrange(_VOCABULARY)) for chunk in plan.chunks if chunk.samples}
    scheduler.complete(StepResult(tokens, 0.01))
    return planned_s


def main() -> None:
    """Print a line for each index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=140_000)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    rng = random.Random(1)
    prompt = rng.choices(range(_VOCABULARY), k=args.tokens)
    for index in (IndexKind.HASH, IndexKind.RADIX):
        blocks = args.tokens // BLOCK + DECODING * SHORT // BLOCK // 2
        cache = PrefixCache(blocks, BLOCK, index=index, eviction=Eviction.LFU)
        scheduler = Scheduler(cache, SchedulerConfig(2048, 32, 64))
        scheduler.add(Request(0, prompt[: -args.tokens // 14], 1))
        while scheduler.has_work:
            step(scheduler, rng)
        for number in range(DECODING):
            scheduler.add(Request(1 + number, rng.choices(range(_VOCABULARY), k=SHORT), 2 * args.steps))
        while scheduler.load().decoding < DECODING:
            step(scheduler, rng)
        scheduler.add(Request(DECODING + 1, prompt, 1))
        taken_s = [step(scheduler, rng) for _ in range(args.steps)]
        assert scheduler.load().waiting == 1, "the prompt has found room"
        print(f"{index}: {1e3 * statistics.median(taken_s):.3f} ms, at most {1e3 * max(taken_s):.3f}")


if __name__ == "__main__":
    main()
