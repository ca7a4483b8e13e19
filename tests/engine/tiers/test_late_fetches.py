"""A fetch whose copies do not end is given up in time, whichever requests are ahead of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from engine.cache.prefix_cache import PrefixCache
from engine.contract.load import StepCost
from engine.sched.request import Request
from engine.tiers.copies.fetch import Prefill
from engine.tiers.link import Link
from engine.tiers.search import LOOKUP_SHARE, Search
from engine.tiers.stores.stats import TierStats
from tests.engine.tiers.test_tiers_stateful import Pod, make_pod

POOL_BLOCKS = 20
PROMPT = tuple(range(3, 19))
LONG = tuple(range(40, 76))


def compute(pod: Pod, request: Request) -> None:
    pod.scheduler.add(request)
    while pod.scheduler.has_work or pod.tiers.is_busy:
        plan = pod.scheduler.schedule()
        if plan is not None:
            pod.scheduler.complete(pod.backend.run(plan))
        for copies in pod.copies:
            copies.end_all()


def test_it_does_not_keep_its_blocks_from_a_request_that_goes_first() -> None:
    """The disk hangs. The scheduler does not look at the fetch's request while an earlier request does not fit."""
    now_s = 0.0
    pod = make_pod(PrefixCache(POOL_BLOCKS, 2), (100, 200), lambda: now_s, token_s=1.0, rate=1e4, running=4)
    compute(pod, Request(0, PROMPT, 1))
    pod.cache.reset()
    pod.links[0].lower.reset()
    pod.scheduler.add(Request(1, PROMPT, 1))
    assert pod.scheduler.schedule() is None, "the first request's blocks are fetched from the disk"
    pod.scheduler.add(Request(2, LONG, 1))
    pod.scheduler._entries[2].overtaken = 100
    assert pod.scheduler.schedule() is None, "the fetch holds the blocks that the second request lacks"
    assert pod.tiers.check_in_s() > 0
    now_s += pod.tiers.check_in_s()
    plan = pod.scheduler.schedule()
    assert plan is not None
    assert {chunk.request.id for chunk in plan.chunks} == {2}
    assert pod.cache.pool.available == POOL_BLOCKS - len(LONG) // 2


class Silent:
    """Look-ups of a folder that hangs."""

    def ask(self, digests: Sequence[bytes], parent: bytes) -> Silent:
        return self

    def found(self) -> None:
        return None

    def cancel(self) -> None:
        pass


def test_nobody_looks_again_and_again_for_the_end_of_a_late_look_up() -> None:
    now_s = 0.0
    search = Search(cast(Link, None), Silent(), lambda: now_s, TierStats())
    sequence = PrefixCache(POOL_BLOCKS, 2).open(PROMPT)
    search.begin(1, sequence, 0, 7, known_s=10.0)
    assert search.waits(1, sequence, Prefill(len(PROMPT), 0, 20, StepCost(token_s=1.0)))
    assert search.late_at_s() == pytest.approx([10 * LOOKUP_SHARE])
    now_s = 10.0
    assert search.late_at_s() == []
