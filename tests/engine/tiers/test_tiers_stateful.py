"""Random traffic over a pool and two tiers. Copies end in any order, end late, or fail. Every token is checked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.contract.events import Tier
from engine.contract.keys import PrefixKey, prefix_keys
from engine.contract.load import StepCost
from engine.sched.plan import StepPlan
from engine.sched.request import CacheMark, KeySpan, Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import QueueFull, Scheduler, SchedulerConfig
from engine.tiers.copies.base import Direction
from engine.tiers.copies.copier import BlockCopier, CopyLimits
from engine.tiers.link import Link
from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import Decision, Outcome
from engine.tiers.tiers import Tiers
from tests.engine.cache.integrity import check_integrity
from tests.engine.sched.checking_backend import CheckingBackend
from tests.engine.sched.test_scheduler_stateful import ARRIVALS, SchedulerMachine
from tests.engine.tiers.folder_model import FolderCopies, FolderModel, FolderSide
from tests.engine.tiers.slot_copies import BLOCK_BYTES, SlotCopies

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
)
FOLDER_SLOTS = 60
PIN_S = 5.0
LIMITS = CopyLimits(job_bytes=2 * BLOCK_BYTES, in_flight_bytes=4 * BLOCK_BYTES)


class FixedCost:
    """A device whose cost is known from the start."""

    least_s = 0.0

    def __init__(self, token_s: float) -> None:
        self._cost = StepCost(token_s=token_s)

    def observe(self, plan: StepPlan, elapsed_s: float, steps: int = 1) -> None:
        """Learn nothing."""

    def cost(self) -> StepCost:
        return self._cost


@dataclass
class Pod:
    """An engine whose tiers are models."""

    cache: PrefixCache
    backend: CheckingBackend
    links: list[Link]
    copies: list[SlotCopies | FolderCopies]
    tiers: Tiers
    scheduler: Scheduler
    side: FolderSide | None


def make_pod(
    cache: PrefixCache,
    lower: Sequence[int],
    clock: Callable[[], float],
    *,
    token_s: float,
    rate: float,
    running: int,
    eviction: Eviction = Eviction.LRU,
    folder: FolderModel | None = None,
) -> Pod:
    """Build an engine with tiers of `lower` blocks below the cache, and the folder below these."""
    backend = CheckingBackend(cache, 20)
    copies: list[SlotCopies | FolderCopies] = []
    links: list[Link] = []
    upper, memory = cache, backend.slots

    def copier_of(made: Any) -> BlockCopier:
        copies.append(made)
        copier = BlockCopier(made, clock, LIMITS)
        for direction in Direction:
            copier.learn_rate(direction, int(rate), 1.0)
        return copier

    for tier, total in zip((Place.HOST, Place.DISK), lower, strict=False):
        below = PrefixCache(total, cache.block_size, eviction=eviction)
        slots = CheckingBackend(below, 20).slots
        links.append(Link(tier, upper, below, copier_of(SlotCopies(memory, slots, upper, below)), BLOCK_BYTES))
        upper, memory = below, slots
    side = None
    if folder is not None:
        below = PrefixCache(FOLDER_SLOTS, cache.block_size, eviction=eviction)
        shared = FolderCopies(memory, folder, upper, below)
        links.append(Link(Place.SHARED, upper, below, copier_of(shared), BLOCK_BYTES, shared.describe))
        side = FolderSide(folder, shared)
    tiers = Tiers(cache, links, step_tokens=20, clock=clock, shared=side)
    tiers.learn_cost(StepCost(token_s=token_s))
    scheduler = Scheduler(cache, SchedulerConfig(20, running, max_waiting=8), tiers)
    scheduler._step_cost = FixedCost(token_s)  # type: ignore[assignment]  # has the methods that are called
    return Pod(cache, backend, links, copies, tiers, scheduler, side)


class TiersMachine(SchedulerMachine):
    """Checks with tiers what is checked without them: outputs, blocks, and that all blocks are free in the end."""

    @initialize(
        blocks=st.integers(5, 12),
        block_size=st.integers(1, 3),
        running=st.sampled_from([3, 4, 1]),
        eviction=st.sampled_from(Eviction),
        index=st.sampled_from([IndexKind.HASH, IndexKind.HASH, IndexKind.RADIX]),
        lower=st.sampled_from([(10, 60), (12, 60), (10, 30), (12, 5), (40,), (12,), (3,)]),
        token_s=st.sampled_from([1.0, 1.0, 0.01, 0.0]),
        rate=st.sampled_from([1000.0, 1000.0, 100.0, 10.0]),
        later=st.booleans(),
        pinned=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def start(
        self,
        blocks: int,
        block_size: int,
        running: int,
        eviction: Eviction,
        index: IndexKind,
        lower: tuple[int, ...],
        token_s: float,
        rate: float,
        later: bool = False,
        pinned: float = 0.0,
    ) -> None:
        """`pinned`: the share of the pool that requests may pin."""
        self.now_s = 0.0
        cache = PrefixCache(blocks, block_size, index=index, eviction=eviction, pinned_blocks=int(pinned * blocks))
        self.use(self.make(cache, lower, token_s=token_s, rate=rate, running=running, eviction=eviction))
        if later:  # deferred work is done with the next step, the latest time allowed
            self.tiers._later = lambda: None
        self.requests: dict[int, Request] = {}
        self.next_id = 0
        self.is_late = False
        self.failing_source: int | None = None
        self.parents: dict[PrefixKey, PrefixKey] = {}
        self.published: dict[PrefixKey, Tier] = {}

    def make(self, cache: PrefixCache, lower: tuple[int, ...], **fields: Any) -> Pod:
        return make_pod(cache, lower, lambda: self.now_s, **fields)

    def use(self, pod: Pod) -> None:
        """Send requests to this engine from now on."""
        self.pod = pod
        self.cache, self.backend, self.links = pod.cache, pod.backend, pod.links
        self.copies, self.tiers, self.scheduler = pod.copies, pod.tiers, pod.scheduler

    @rule(arrivals=st.lists(ARRIVALS, min_size=2, max_size=6))
    def add(self, arrivals: list[tuple[Any, ...]]) -> None:
        for prompt, max_tokens, stop, seed, salt in arrivals:
            keys = prefix_keys(bytes(prompt), seed=len(salt), stride=2)
            self.parents.update((child, parent) for parent, child in pairwise(keys))
            spans = tuple(KeySpan(key, 2 * (i + 1)) for i, key in enumerate(keys))
            marks = (CacheMark(len(prompt), PIN_S),) if seed else ()
            request = Request(
                self.next_id, prompt, max_tokens, SamplingParams(seed=seed), stop, spans, salt, marks=marks
            )
            self.next_id += 1
            try:
                self.scheduler.add(request)
            except (QueueFull, ValueError):
                continue
            self.requests[request.id] = request

    @rule(
        which=st.lists(st.integers(0, 5), min_size=1, max_size=6),
        ends=st.sampled_from(["all", "all", "none", "late", "some fail"]),
    )
    def serve(self, which: list[int], ends: str) -> None:
        """Serve prompts that repeat and push each other out of the pool. Each request ends before the next begins."""
        self.is_late = ends == "late"
        for number in which:
            self.failing_source = number % 3 if ends == "some fail" else None
            length = min(10, (self.cache.pool.total - 1) * self.cache.block_size - 1)
            prompt = tuple(([1, 2] if number % 2 else [3]) + [number % 3 + 1] * length)[:length]
            self.add([(prompt, 1, frozenset(), number % 2, "")])
            for _ in range(200):
                if not self.requests:
                    break
                self.one_step(aborted=[])
                self.is_sound()
                if ends in ("all", "some fail"):
                    self.end_copies()
        self.failing_source = None
        self.is_late = False

    @precondition(lambda self: any(copies.flying for copies in self.copies))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_copy(self, data: st.DataObject, fails: bool) -> None:
        copies = data.draw(st.sampled_from([copies for copies in self.copies if copies.flying]))
        cast(Any, copies).end(data.draw(st.sampled_from(copies.flying)), fails=fails)

    @rule()
    def go_on(self) -> None:
        self.tiers.go_on()

    def end_copies(self) -> None:
        """End all copies under way; some may fail. Then begin the copies that wait."""
        for copies in self.copies:
            for flying in tuple(copies.flying):
                cast(Any, copies).end(flying, fails=flying.run.source % 3 == self.failing_source)
        self.tiers.go_on()

    @rule(seconds=st.sampled_from([0.001, 1.0, 1000.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_cache()

    def schedule(self) -> StepPlan | None:
        self.scheduler.advance(self.now_s)
        plan = self.scheduler.schedule()
        for _ in range(200):
            if plan is not None or not self.requests:
                break
            assert self.something_comes(), "requests wait, but nothing runs and no copy is under way"
            if self.is_late:
                self.copies[0].end_all()
                self.now_s += 1000  # the disk hangs: no request waits for it
            else:
                self.end_copies()
            plan = self.scheduler.schedule()
        assert (plan is not None) == bool(self.requests), "work waits, but nothing runs"
        return plan

    def something_comes(self) -> bool:
        return any(link.is_busy for link in self.links)

    @invariant()
    def is_sound(self) -> None:
        self.now_s += 0.01
        check_integrity(self.cache)
        for link in self.links:
            check_integrity(link.lower)
        assert self.scheduler.load().uncached_tokens == self.brute_force_uncached()
        self.keys_are_true()

    def keys_are_true(self) -> None:
        """Check that the published keys are prefix-closed after each reported change, and equal what the tiers hold."""
        changes = self.scheduler.take_changes()
        for key in changes.removed:
            del self.published[key]
            assert not any(self.parents.get(child) == key for child in self.published), "a key went before its children"
        for key, tier in changes.stored:
            assert self.published.get(key) is not tier, "a reported change changes nothing"
            self.published[key] = tier
            parent = self.parents.get(key)
            assert parent is None or parent in self.published, "a key was stored before its parent"
        # Blocks that are only in the folder belong to no engine.
        caches = [self.cache, *[link.lower for link in self.links if link.tier != Place.SHARED]]
        model: dict[PrefixKey, Tier] = {}
        for tier, cache in reversed(list(zip(Tier, caches, strict=False))):
            model.update((key, tier) for keys in cache._indexed.keys for key in keys)
        assert self.published == model
        held = self.scheduler.held_keys()
        assert {key: tier for tier, keys in zip(Tier, held, strict=True) for key in keys} == model

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return
        bound = sum(8 * (len(r.prompt_tokens) + r.max_tokens) for r in self.requests.values())
        for _ in range(bound):
            if not self.requests:
                break
            self.one_step(aborted=[])
        assert not self.requests, f"not finished after {bound} steps"
        self.tiers.begin_step(0.0)  # no request is computed any more
        self.scheduler.advance(self.now_s + PIN_S)
        for _ in range(200):
            self.tiers.poll()
            for copies in self.copies:
                copies.end_all()
        assert not self.tiers.is_busy
        for cache in (self.cache, *[link.lower for link in self.links]):
            assert cache.pool.available == cache.pool.total, "a copy did not give its blocks back"
            check_integrity(cache)
        assert not self.tiers._fetches
        assert not self.tiers._fetched
        assert not self.tiers._wanted
        assert not self.tiers._left
        assert not self.tiers._decided


def test_every_way_of_a_fetch_is_walked() -> None:
    """Long runs of repeated prompts with a fixed seed and the same checks, in which tiers do everything they can do."""
    totals: Counter[object] = Counter()
    draw = random.Random(3)
    for lower in [(10, 60), (12, 60), (10, 30), (40,), (12,)] * 4:
        machine = TiersMachine()
        machine.start(
            blocks=draw.randint(6, 11),
            block_size=draw.randint(1, 2),
            running=draw.choice([1, 3]),
            eviction=draw.choice(list(Eviction)),
            index=draw.choice([IndexKind.HASH, IndexKind.RADIX]),
            lower=lower,
            token_s=1.0,
            rate=1000.0,
            later=draw.choice([True, False]),
            pinned=draw.choice([0.0, 0.5]),
        )
        for _ in range(8):
            which = [draw.randint(0, 5) for _ in range(4)]
            machine.serve(which, draw.choice(["all", "all", "none", "late", "some fail"]))
        machine.teardown()
        stats = machine.tiers.stats
        for name in ("demoted", "promoted", "hit_tokens", "errors", "decisions", "outcomes", "skipped"):
            totals.update({(name, kind): count for kind, count in getattr(stats, name).items()})
    seen = [kind for kind, count in totals.items() if count]
    wanted: set[tuple[str, object]] = {
        (name, tier) for name in ("demoted", "promoted", "hit_tokens") for tier in (Tier.HOST, Tier.DISK)
    }
    wanted |= {("outcomes", outcome) for outcome in Outcome} | {("decisions", Decision.FETCH)}
    assert wanted <= set(seen)


def test_every_token_is_right_whatever_the_copies_do() -> None:
    run_state_machine_as_test(TiersMachine, settings=SETTINGS)
