"""What tiers cost the steps of other requests if the engine itself decides what to copy, on the CPU.

    python -m tests.bench.engine.bench_tier_traffic [--rounds 20] [--steps 60] [--prompts 24]

The bench uses the engine's own scheduler, cache, host tier and KV. 7 requests decode all the time, at contexts from 512
tokens on. Meanwhile, requests are answered one after another; each prompt is one of `--prompts`, of 500 tokens each.
Together these exceed the pool. So each prefill evicts older blocks, the blocks of each request are copied down at
its end, and those of a recurring prompt are copied up if that is faster. One thread computes and plans, and all times
are its CPU time. Three engines take turns in each round: without tiers, with tiers, and with tiers whose work has no
bound (`engine.tiers.allowance`).

`planning`: the time in the tiers. The sum over all steps is relative to all of the thread's time; single values are
relative to the median step that only decodes. `while it runs`: what an engine does while another thread computes the
step. In an engine, that work delays the step only while it holds the interpreter's lock. Here there is one thread, so
all of it counts. `beside copies`: the median decode-only step during a copy / the median one without a copy in the same
round, both with planning. The line has the median of the rounds and their interquartile range. `again`: the same for an
engine without tiers, with its steps divided into two groups at random.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.backend.host_tier import cpu_host_store
from engine.backend.torch_backend import TorchBackend
from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.model.checkpoint import make_checkpoint
from engine.model.decoder import load_decoder
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.tiers.allowance import STEP_SHARE, StepSharing
from engine.tiers.build import make_tiers
from engine.tiers.tiers import Tiers

BLOCK_SIZE, POOL_BLOCKS, HOST_BLOCKS = 16, 600, 2400
DECODING, CONTEXT = 7, 512
PROMPT, ANSWER = 500, 8
STEP_TOKENS = 256


@dataclass
class Spent:
    """CPU seconds of the steps of one arm."""

    planning_s: list[float] = field(default_factory=list)
    """CPU seconds in the tiers, before the step begins and after it has ended."""
    meanwhile_s: list[float] = field(default_factory=list)
    """CPU seconds in the tiers, while the step runs."""
    step_s: list[float] = field(default_factory=list)
    is_alone: list[bool] = field(default_factory=list)
    """Whether each step only decodes."""
    is_busy: list[bool] = field(default_factory=list)
    """Whether a copy was in progress when the step began or ended."""
    answered: int = 0


class Metered:
    """`Tiers`, with the CPU time of the calling thread."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self.spent_s = tiers, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.tiers, name)
        if not callable(found):
            return found

        def metered(*args: Any, **fields: Any) -> Any:
            start = time.thread_time()
            try:
                return found(*args, **fields)
            finally:
                self.spent_s += time.thread_time() - start

        return metered


class Pod:
    """An engine without its loop: it runs steps one after another on this thread."""

    def __init__(self, folder: str, share: float | None) -> None:
        """`share`: the share of each step that copies may take; None: there are no tiers."""
        self.backend = TorchBackend(load_decoder(folder), block_count=POOL_BLOCKS, block_size=BLOCK_SIZE)
        cache = PrefixCache(POOL_BLOCKS, BLOCK_SIZE, index=IndexKind.RADIX, eviction=Eviction.LFU)
        self.tiers: Metered | None = None
        self.is_wanted = False
        self.close: Callable[[], object] = lambda: None
        if share is not None:
            store = cpu_host_store(self.backend.pool, HOST_BLOCKS * self.backend.pool.data[0].nbytes)
            self.close = store.close
            self.tiers = Metered(
                make_tiers(
                    cache,
                    [store],
                    eviction=Eviction.LFU,
                    step_tokens=STEP_TOKENS,
                    clock=time.monotonic,
                    on_end=self.go_on_soon,
                    sharing=StepSharing(share, computed=time.thread_time, later=self.go_on_soon),
                )
            )
        self.scheduler = Scheduler(cache, SchedulerConfig(STEP_TOKENS, 16, 64), self.tiers)
        self.rng, self.number, self.spent = random.Random(1), 0, Spent()
        self.asked: int | None = None
        self.prompts: list[list[int]] = []

    def begin(self) -> None:
        """Start counting."""
        self.spent = Spent()
        if self.tiers is not None:
            self.tiers.stats.demoted.clear()
            self.tiers.stats.promoted.clear()

    def go_on_soon(self) -> None:
        """Request that the tiers go on; any thread may call this while a step runs."""
        self.is_wanted = True

    def go_on(self) -> float:
        """Do what the engine's event loop does during a step; return its CPU seconds."""
        if not self.is_wanted or self.tiers is None:
            return 0.0
        self.is_wanted, before = False, self.tiers.spent_s
        self.tiers.go_on()
        return self.tiers.spent_s - before

    def ask(self, tokens: list[int], answer: int) -> int:
        """Queue a request; return its number."""
        self.number += 1
        self.scheduler.add(Request(self.number, tokens, answer, SamplingParams(temperature=0)))
        return self.number

    def step(self) -> None:
        """Run one step, with the work before and after it."""
        start, spent_before = time.thread_time(), self.tiers.spent_s if self.tiers else 0.0
        is_busy = bool(self.tiers and self.tiers.is_busy)
        plan = self.scheduler.schedule()
        assert plan is not None
        meanwhile_s = self.go_on()  # decided copies begin
        result = self.backend._step(plan)
        meanwhile_s += self.go_on()  # copies that have ended are processed
        outputs = self.scheduler.complete(result)
        spent = self.spent
        spent.step_s.append(time.thread_time() - start)
        spent.planning_s.append((self.tiers.spent_s if self.tiers else 0.0) - spent_before - meanwhile_s)
        spent.meanwhile_s.append(meanwhile_s)
        spent.is_alone.append(all(chunk.decodes for chunk in plan.chunks))
        spent.is_busy.append(is_busy or bool(self.tiers and self.tiers.is_busy))
        for output in outputs:
            if output.finish and output.request_id == self.asked:
                self.asked = None
                spent.answered += 1
            elif output.finish:
                self.decode_on()

    def decode_on(self) -> None:
        """Start one more of the requests that decode all the time."""
        self.ask([self.rng.randrange(200) for _ in range(CONTEXT)], self.rng.randint(300, 500))

    def serve(self, steps: int) -> None:
        """Run `steps` steps; whenever a prompt has its answer, send the next recurring prompt."""
        for _ in range(steps):
            if self.asked is None:
                self.asked = self.ask(self.rng.choice(self.prompts), ANSWER)
            self.step()


def ratio(spent: Spent, steps: range) -> float | None:
    """Return the ratio of one round; None if copies ran during none of the decode steps, or during all."""
    alone = [i for i in steps if spent.is_alone[i]]
    beside, idle = ([spent.step_s[i] for i in alone if spent.is_busy[i] is busy] for busy in (True, False))
    return statistics.median(beside) / statistics.median(idle) if beside and idle else None


def report(name: str, pod: Pod, steps: int) -> None:
    """Print what one engine's steps took."""
    spent = pod.spent
    total = len(spent.step_s)
    decode_s = statistics.median(s for s, alone in zip(spent.step_s, spent.is_alone, strict=True) if alone)
    print(f"{name}: {spent.answered} answers in {total} steps of {1e3 * statistics.fmean(spent.step_s):.2f} ms", end="")
    print(f" (decodes alone {1e3 * decode_s:.2f})")
    if pod.tiers is not None:
        moved = pod.tiers.stats.demoted.total() + pod.tiers.stats.promoted.total()
        print(f"  {moved / total:.1f} blocks a step")
        for what, seconds in (("planning", sorted(spent.planning_s)), ("while it runs", sorted(spent.meanwhile_s))):
            shares = ", ".join(
                f"{word} {seconds[min(int(at * total), total - 1)] / decode_s:.2%}"
                for word, at in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("most", 1.0))
            )
            print(f"  {what}: {sum(seconds) / sum(spent.step_s):.2%} of all, {shares}")
    else:
        spent.is_busy = [pod.rng.random() < 0.2 for _ in range(total)]
    found = [one for at in range(0, total, steps) if (one := ratio(spent, range(at, at + steps))) is not None]
    if len(found) > 1:
        low, middle, high = statistics.quantiles(found, n=4)
        word = "again" if pod.tiers is None else "beside copies"
        print(f"  {word}: {middle:.3f} ({low:.3f} to {high:.3f}) in {len(found)} rounds")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="steps of each engine in a round")
    parser.add_argument("--prompts", type=int, default=24)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(2)
    prompts = [[rng.randrange(200) for _ in range(PROMPT)] for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        shares = {"without tiers": None, "with tiers": STEP_SHARE, "with tiers, unbounded": 1e9}
        pods = {name: Pod(folder, share) for name, share in shares.items()}
    for pod in pods.values():
        pod.prompts = prompts
        for _ in range(DECODING):
            pod.decode_on()
        pod.serve(300)
        pod.begin()
    for number in range(args.rounds):
        for pod in random.Random(number).sample(list(pods.values()), len(pods)):
            pod.serve(args.steps)
    for name, pod in pods.items():
        report(name, pod, args.steps)
        pod.close()


if __name__ == "__main__":
    main()
