"""The cost of the cache if it saves nothing, and the share of repeated tokens at which it begins to pay off.

    python -m tests.bench.engine.bench_cache_overhead [--profile h100-8b] [--rounds 8] [--only unique]
        [--arms hash radix]

The bench uses the real scheduler, cache and tiers, with steps and copies that take the time of the emulated device. The
clock advances only for these and for the CPU time of this process in the scheduler. A device that takes two steps at a
time would hide that CPU time; nothing hides it here. So throughput is that of a host that works only between two steps.
Two things happen in parallel with the steps, as in the engine, and have columns of their own: a prompt's blocks are
hashed (by text threads), and copies between tiers begin and end (on the event loop).

Each round has different prompts. In a round every arm serves the same prompts, and the order of arms changes. A cell is
the throughput relative to `off` in the same round: the median of the rounds and its interval of at least 95 %. The
interval follows from the ranks of the rounds, whatever their distribution; with fewer than 9 rounds it covers all of
them. Parentheses have the share of prompt tokens that were reused.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from engine.backend.profiles import SimProfile, find_profile
from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.common.collector import MIDDLE, OLDEST, YOUNG
from engine.contract.prefix_key import PrefixKey
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import KeySpan, Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.tiers.allowance import StepSharing
from engine.tiers.build import make_tiers
from engine.tiers.stores.opening import emulated_store
from engine.tiers.stores.place import Place
from engine.tiers.tiers import Tiers

BLOCK, STEP_TOKENS, CONCURRENT, KEY_TOKENS = 16, 2048, 32, 64
"""Tokens of a block and of a step, concurrent requests, tokens per prefix key."""
_VOCABULARY = 100_000


class Clock:
    """A clock that tests advance (`engine.tiers.stores.emulated.Timers`)."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def time(self) -> float:
        """Return the time in seconds."""
        return self._now_s

    def call_at(self, when: float, callback: Callable[[], object], /) -> None:
        """Call `callback` at that time."""
        heapq.heappush(self._due, (when, next(self._numbers), callback))

    def go_on(self, seconds: float) -> None:
        """Advance the time by `seconds`."""
        until_s = self._now_s + seconds
        while self._due and self._due[0][0] <= until_s:
            self._now_s, _, callback = heapq.heappop(self._due)
            callback()
        self._now_s = until_s

    def next_s(self) -> float:
        """Return the seconds until the next call is due."""
        return self._due[0][0] - self._now_s if self._due else math.inf


@dataclass(frozen=True)
class Asked:
    """A prompt, its keys, and the number of tokens in its answer."""

    prompt: Sequence[int]
    spans: tuple[KeySpan, ...]
    answer: int


@dataclass(frozen=True)
class Arm:
    """One side of the comparison. Sizes of the tiers are relative to the pool: 1.0 is a tier as large as the pool."""

    name: str
    index: IndexKind
    host: float = 0.0
    disk: float = 0.0


OFF = Arm("off", IndexKind.OFF)
ARMS = (
    OFF,
    Arm("hash", IndexKind.HASH),
    Arm("radix", IndexKind.RADIX),
    Arm("hash, host tier", IndexKind.HASH, 1.0),
    Arm("radix, host tier", IndexKind.RADIX, 1.0),
    Arm("radix, host and disk", IndexKind.RADIX, 1.0, 4.0),
)


@dataclass
class Ran:
    """The result of one arm's run."""

    requests: int
    elapsed_s: float
    cpu_s: float
    """CPU seconds of the host between steps."""
    hash_s: float
    """CPU seconds for hashing a request's blocks, on average."""
    beside_s: float
    """CPU seconds for copies, while steps run."""
    hit_share: float

    @property
    def per_s(self) -> float:
        """Return requests per second."""
        return self.requests / self.elapsed_s


def run(arm: Arm, profile: SimProfile, asked: Sequence[Asked], *, warm_up: int) -> Ran:
    """Serve all requests, `CONCURRENT` at a time; measurement begins after the first `warm_up` requests."""
    clock = Clock()
    cache = PrefixCache(profile.kv_tokens // BLOCK, BLOCK, index=arm.index, eviction=Eviction.LFU)
    wanted: list[None] = []
    beside_s = 0.0

    def go_on() -> None:
        nonlocal beside_s
        start_s = time.thread_time()
        wanted.clear()
        if tiers is not None:
            tiers.go_on()
        beside_s += time.thread_time() - start_s

    tiers = _tiers(arm, profile, cache, clock, lambda: wanted.append(None), go_on)
    scheduler = Scheduler(cache, SchedulerConfig(STEP_TOKENS, CONCURRENT, CONCURRENT), tiers)
    waiting, numbers = iter(asked), count()
    open_requests = finished = 0
    cpu_s = hash_s = began_s = began_cpu_s = began_beside_s = 0.0
    before = scheduler.stats()
    while True:
        arrived = []
        start_s = time.thread_time()
        while open_requests < CONCURRENT and (one := next(waiting, None)) is not None:
            hashed = scheduler.hash_prompt(one.prompt, "", one.spans)
            arrived.append(Request(next(numbers), one.prompt, one.answer, hashed=hashed))
            open_requests += 1
        hash_s += time.thread_time() - start_s
        plan, host_s = _planned(scheduler, arrived, clock)
        cpu_s += host_s
        if plan is None:
            if not scheduler.has_work:
                break
            assert tiers is not None, "work waits and nothing runs"
            clock.go_on(min(clock.next_s(), tiers.check_in_s()))
            continue
        if wanted:
            go_on()
        step_s = profile.step_s(plan)
        clock.go_on(step_s)
        sampled = {chunk.request.id: SampledToken(7 + len(chunk.blocks)) for chunk in plan.chunks if chunk.samples}
        ended, host_s = _completed(scheduler, StepResult(sampled, step_s), clock)
        cpu_s += host_s
        open_requests -= ended
        if finished < warm_up <= finished + ended:
            began_s, began_cpu_s, began_beside_s, before = clock.time(), cpu_s, beside_s, scheduler.stats()
            warm_up = finished + ended
        finished += ended
    stats = scheduler.stats()
    queried = stats.prompt_tokens_queried - before.prompt_tokens_queried
    hit = stats.prompt_tokens_hit - before.prompt_tokens_hit
    return Ran(
        finished - warm_up,
        clock.time() - began_s,
        cpu_s - began_cpu_s,
        hash_s / finished,
        beside_s - began_beside_s,
        hit / queried,
    )


def _planned(scheduler: Scheduler, arrived: Sequence[Request], clock: Clock) -> tuple[StepPlan | None, float]:
    """Take in what arrived and plan a step. Return the plan and its CPU seconds, by which the clock goes on."""
    start_s = time.thread_time()
    for request in arrived:
        scheduler.add(request)
    scheduler.advance(clock.time())
    plan = scheduler.schedule()
    scheduler.take_changes()
    host_s = time.thread_time() - start_s
    clock.go_on(host_s)
    return plan, host_s


def _completed(scheduler: Scheduler, result: StepResult, clock: Clock) -> tuple[int, float]:
    """Complete a step. Return how many requests ended, and the CPU seconds, by which the clock goes on."""
    start_s = time.thread_time()
    outputs = scheduler.complete(result)
    host_s = time.thread_time() - start_s
    clock.go_on(host_s)
    return sum(output.finish is not None for output in outputs), host_s


def _tiers(
    arm: Arm,
    profile: SimProfile,
    cache: PrefixCache,
    clock: Clock,
    later: Callable[[], object],
    on_end: Callable[[], None],
) -> Tiers | None:
    stores = []
    upper = cache.pool.total
    for tier, pools, gb_s in (
        (Place.HOST, arm.host, profile.host_gb_s),
        (Place.DISK, arm.disk, profile.disk_gb_s),
    ):
        if pools:
            block_bytes = BLOCK * profile.kv_token_bytes
            tier_bytes = int(pools * cache.pool.total) * block_bytes
            stores.append(
                emulated_store(
                    clock, tier, tier_bytes, pool_blocks=upper, block_bytes=block_bytes, bytes_per_s=gb_s * 1e9
                )
            )
            upper = stores[-1].blocks
    if not stores:
        return None
    return make_tiers(
        cache,
        stores,
        eviction=Eviction.LFU,
        step_tokens=STEP_TOKENS,
        clock=clock.time,
        on_end=on_end,
        sharing=StepSharing(later=later),
    )


def _spans(rng: random.Random, tokens: int, shared: tuple[KeySpan, ...] = ()) -> tuple[KeySpan, ...]:
    """Return a key every `KEY_TOKENS` tokens; the first keys are those of the shared text."""
    ends = range(KEY_TOKENS * (len(shared) + 1), tokens + 1, KEY_TOKENS)
    return (*shared, *[KeySpan(PrefixKey(rng.getrandbits(63)), end) for end in ends])


def _text(rng: random.Random, tokens: int) -> list[int]:
    return rng.choices(range(_VOCABULARY), k=tokens)


def unique(rng: random.Random, pool_tokens: int) -> list[Asked]:
    """Return unique prompts of 512 to 4,096 tokens that fill four pools in total."""
    asked = []
    left = 4 * pool_tokens
    while left > 0:
        tokens = rng.randint(512, 4096)
        asked.append(Asked(_text(rng, tokens), _spans(rng, tokens), rng.randint(16, 128)))
        left -= tokens + asked[-1].answer
    return asked


def working_set(rng: random.Random, pool_tokens: int, pools: float) -> list[Asked]:
    """Return different prompts that fill `pools` pools in total."""
    return unique(rng, int(pools * pool_tokens / 4))


def in_turn(rng: random.Random, pool_tokens: int) -> list[Asked]:
    """Return 1.5 pools of prompts in a repeated sequence: the least recently used prompt is always the next."""
    return working_set(rng, pool_tokens, 1.5) * 4


def at_random(rng: random.Random, pool_tokens: int) -> list[Asked]:
    """Return 1.5 pools of prompts in random order."""
    prompts = working_set(rng, pool_tokens, 1.5)
    return [rng.choice(prompts) for _ in range(4 * len(prompts))]


def repeating(share: float) -> Callable[[random.Random, int], list[Asked]]:
    """Return prompts of 2,048 tokens. A share of 2 * `share` of them begins with one of eight texts of 1,024 tokens."""

    def prompts(rng: random.Random, pool_tokens: int) -> list[Asked]:
        beginnings = []
        for _ in range(8):
            text = _text(rng, 1024)
            beginnings.append((text, _spans(rng, 1024)))
        asked = []
        for _ in range(3 * pool_tokens // 2048):
            if rng.random() < 2 * share:
                text, spans = rng.choice(beginnings)
                asked.append(Asked(text + _text(rng, 1024), _spans(rng, 2048, spans), 64))
            else:
                asked.append(Asked(_text(rng, 2048), _spans(rng, 2048), 64))
        return asked

    return prompts


SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
TRAFFIC: dict[str, Callable[[random.Random, int], list[Asked]]] = {
    "unique": unique,
    "thrash in turn": in_turn,
    "thrash at random": at_random,
    **{f"{share:.0%} repeated": repeating(share) for share in SHARES},
}


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its interval: at least 95 % if there are 6 rounds or more."""
    ordered, rounds = sorted(ratios), len(ratios)
    outside, rank = 1 / 2**rounds, 0  # chance of fewer than `rank + 1` rounds on one side of the median
    while (more := outside + math.comb(rounds, rank + 1) / 2**rounds) <= 0.025:
        outside, rank = more, rank + 1
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


def compare(profile: SimProfile, traffic: str, arms: Sequence[Arm], rounds: int) -> dict[Arm, list[Ran]]:
    """Return each arm's runs, by round."""
    ran: dict[Arm, list[Ran]] = {arm: [] for arm in arms}
    for number in range(rounds):
        asked = TRAFFIC[traffic](random.Random(number), profile.kv_tokens)
        order = random.Random(number).sample(arms, len(arms))
        for arm in order:
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # as after an engine's start (`engine/common/collector.py`)
            ran[arm].append(run(arm, profile, asked, warm_up=len(asked) // 3))
    return ran


def cell(ours: Sequence[Ran], off: Sequence[Ran]) -> str:
    """Return a cell of the table."""
    median, low, high = interval([one.per_s / other.per_s for one, other in zip(ours, off, strict=True)])
    return f"{median:.3f} [{low:.3f}, {high:.3f}] ({statistics.fmean(one.hit_share for one in ours):.1%})"


def cpu_ms(runs: Sequence[Ran]) -> str:
    """Return a request's milliseconds between steps, for hashing, and for copies: medians of the rounds."""
    between, copies = (
        statistics.median(seconds(one) / one.requests for one in runs)
        for seconds in (lambda one: one.cpu_s, lambda one: one.beside_s)
    )
    hashing = statistics.median(one.hash_s for one in runs)
    return " + ".join(f"{seconds * 1e3:.2f}" for seconds in (between, hashing, copies))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h100-8b", help="profile of the emulated device (h100-8b: the fastest)")
    parser.add_argument("--rounds", type=int, default=8, help="at least 6 (8)")
    parser.add_argument("--only", help="only traffic whose name contains this")
    names = [arm.name for arm in ARMS[1:]]
    parser.add_argument("--arms", nargs="+", default=names, choices=names, help="arms to run besides off (all)")
    arguments = parser.parse_args()
    profile = find_profile(arguments.profile)
    arms = [arm for arm in ARMS if arm is OFF or arm.name in arguments.arms]
    gc.set_threshold(YOUNG, MIDDLE, OLDEST)
    print("| traffic | " + " | ".join(arm.name for arm in arms[1:]) + " |\n|---|" + "--:|" * (len(arms) - 1))
    spent = []
    for name in TRAFFIC:
        if arguments.only is None or arguments.only in name:
            ran = compare(profile, name, arms, arguments.rounds)
            print(f"| {name} | " + " | ".join(cell(ran[arm], ran[OFF]) for arm in arms[1:]) + " |", flush=True)
            spent.append(f"| {name} | " + " | ".join(cpu_ms(ran[arm]) for arm in arms) + " |")
    print("\nCPU of a request in ms, between steps + to hash it + for copies while steps run:\n")
    print("| traffic | " + " | ".join(arm.name for arm in arms) + " |\n|---|" + "--:|" * len(arms))
    print("\n".join(spent))


if __name__ == "__main__":
    main()
