"""Random traffic over a pool and two tiers whose copies end in any order, late, or badly; every token is checked."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from engine.backend.tiers.base import Direction
from engine.backend.tiers.copier import BlockCopier, CopyLimits
from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.contract.events import Tier
from engine.contract.keys import PrefixKey, prefix_keys
from engine.contract.load import StepCost
from engine.sched.plan import StepPlan
from engine.sched.request import KeySpan, Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import QueueFull, Scheduler, SchedulerConfig
from engine.tiers.link import Link
from engine.tiers.tiers import Tiers
from tests.engine.sched.checking_backend import CheckingBackend
from tests.engine.sched.test_scheduler_stateful import ARRIVALS, SchedulerMachine
from tests.engine.tiers.slot_copies import BLOCK_BYTES, SlotCopies

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
)
LIMITS = CopyLimits(run_bytes=2 * BLOCK_BYTES, in_flight_bytes=4 * BLOCK_BYTES)


class FixedCost:
    """A device whose cost is known from the start."""

    def __init__(self, token_s: float) -> None:
        self._cost = StepCost(token_s=token_s)

    def observe(self, plan: StepPlan, elapsed_s: float, steps: int = 1) -> None:
        """Nothing to learn."""

    def cost(self) -> StepCost:
        return self._cost


class TiersMachine(SchedulerMachine):
    """All that holds without tiers holds with them: outputs, blocks, what is free in the end."""

    @initialize(
        blocks=st.integers(5, 12),
        block_size=st.integers(1, 3),
        running=st.sampled_from([3, 4, 1]),
        eviction=st.sampled_from(Eviction),
        lower=st.sampled_from([(10, 60), (12, 60), (10, 30), (12, 5), (40,), (12,), (3,)]),
        token_s=st.sampled_from([1.0, 1.0, 0.01, 0.0]),
        rate=st.sampled_from([1000.0, 1000.0, 100.0, 10.0]),
    )
    def start(self, blocks, block_size, running, eviction, lower, token_s, rate):
        self.cache = PrefixCache(blocks, block_size, eviction=eviction)
        self.backend = CheckingBackend(self.cache, 20)
        self.now_s = 0.0
        self.copies: list[SlotCopies] = []
        links, upper, memory = [], self.cache, self.backend.slots
        for tier, total in zip((Tier.HOST, Tier.DISK), lower, strict=False):
            cache = PrefixCache(total, block_size, eviction=eviction)
            below = CheckingBackend(cache, 20).slots
            copies = SlotCopies(memory, below, upper, cache)
            copier = BlockCopier(copies, lambda: self.now_s, LIMITS)
            for direction in Direction:
                copier.learn_rate(direction, int(rate), 1.0)
            links.append(Link(tier, upper, cache, copier, BLOCK_BYTES))
            self.copies.append(copies)
            upper, memory = cache, below
        self.links = links
        self.tiers = Tiers(self.cache, links, step_tokens=20, clock=lambda: self.now_s)
        self.tiers.learn_cost(StepCost(token_s=token_s))
        self.scheduler = Scheduler(self.cache, SchedulerConfig(20, running, max_waiting=8), self.tiers)
        self.scheduler._step_cost = FixedCost(token_s)
        self.requests: dict[int, Request] = {}
        self.next_id = 0
        self.is_late = False
        self.parents: dict[PrefixKey, PrefixKey] = {}
        self.published: dict[PrefixKey, Tier] = {}

    @rule(arrivals=st.lists(ARRIVALS, min_size=2, max_size=6))
    def add(self, arrivals):
        for prompt, max_tokens, stop, seed, salt in arrivals:
            keys = prefix_keys(bytes(prompt), seed=len(salt), stride=2)
            self.parents.update((child, parent) for parent, child in pairwise(keys))
            spans = tuple(KeySpan(key, 2 * (i + 1)) for i, key in enumerate(keys))
            request = Request(self.next_id, prompt, max_tokens, SamplingParams(seed=seed), stop, spans, salt)
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
    def serve(self, which, ends):
        """Prompts that come again and push each other out of the pool, each served to its end."""
        self.is_late = ends == "late"
        for number in which:
            length = min(10, (self.cache.pool.total - 1) * self.cache.block_size - 1)
            prompt = tuple(([1, 2] if number % 2 else [3]) + [number % 3 + 1] * length)[:length]
            self.add([(prompt, 1, frozenset(), 0, "")])
            for _ in range(200):
                if not self.requests:
                    break
                self.one_step(aborted=[])
                self.is_sound()
                for copies in self.copies if ends in ("all", "some fail") else []:
                    for flying in tuple(copies.flying):
                        copies.end(flying, fails=ends == "some fail" and (flying.run.source + number) % 3 == 0)

        self.is_late = False

    @precondition(lambda self: any(copies.flying for copies in self.copies))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_copy(self, data, fails):
        copies = data.draw(st.sampled_from([copies for copies in self.copies if copies.flying]))
        copies.end(data.draw(st.sampled_from(copies.flying)), fails=fails)

    @rule(seconds=st.sampled_from([0.001, 1.0, 1000.0]))
    def time_goes_by(self, seconds):
        self.now_s += seconds

    @rule()
    def reset(self):
        self.scheduler.reset_cache()

    def schedule(self):
        plan = self.scheduler.schedule()
        for _ in range(200):
            if plan is not None or not self.requests:
                break
            assert self.tiers.is_busy, "work waits, but nothing runs and nothing comes"
            self.copies[0].end_all()
            if self.is_late:
                self.now_s += 1000  # the disk hangs: nobody waits for it
            else:
                for copies in self.copies:
                    copies.end_all()
            plan = self.scheduler.schedule()
        assert (plan is not None) == bool(self.requests), "work waits, but nothing runs"
        return plan

    @invariant()
    def is_sound(self):
        self.now_s += 0.01
        self.cache.check_integrity()
        for link in self.links:
            link.lower.check_integrity()
        assert self.scheduler.load().uncached_tokens == self.brute_force_uncached()
        self.keys_are_true()

    def keys_are_true(self):
        """What is published follows from the reports, is prefix-closed at each of them, and is what the tiers hold."""
        changes = self.scheduler.take_changes()
        for key in changes.removed:
            del self.published[key]
            assert not any(self.parents.get(child) == key for child in self.published), "a key went before its children"
        for key, tier in changes.stored:
            assert self.published.get(key) is not tier, "a change that is none"
            self.published[key] = tier
            parent = self.parents.get(key)
            assert parent is None or parent in self.published, "a key came before its parent"
        caches = [self.cache, *[link.lower for link in self.links]]
        model: dict[PrefixKey, Tier] = {}
        for tier, cache in reversed(list(zip(Tier, caches, strict=False))):
            model.update((key, tier) for keys in cache._indexed.keys for key in keys)
        assert self.published == model
        held = self.scheduler.held_keys()
        assert {key: tier for tier, keys in zip(Tier, held, strict=True) for key in keys} == model

    def teardown(self):
        if not hasattr(self, "tiers"):
            return
        bound = sum(8 * (len(r.prompt_tokens) + r.max_tokens) for r in self.requests.values())
        for _ in range(bound):
            if not self.requests:
                break
            self.one_step(aborted=[])
        assert not self.requests, f"not finished after {bound} steps"
        for _ in range(200):
            self.tiers.poll()
            for copies in self.copies:
                copies.end_all()
        assert not self.tiers.is_busy
        for cache in (self.cache, *[link.lower for link in self.links]):
            assert cache.pool.available == cache.pool.total, "a copy has kept its blocks"
            cache.check_integrity()
        assert not self.tiers._fetches
        assert not self.tiers._fetched
        assert not self.tiers._left
        assert not self.tiers._decided


def test_every_token_is_right_whatever_the_copies_do():
    run_state_machine_as_test(TiersMachine, settings=SETTINGS)
