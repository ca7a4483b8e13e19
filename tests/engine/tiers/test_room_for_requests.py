"""Copies downwards hold blocks of the pool. Running requests and kept prefixes do not suffer from that."""

from __future__ import annotations

import pytest

from engine.cache.prefix_cache import PrefixCache
from engine.sched.request import CacheMark, Request
from engine.tiers.copies.base import Direction
from tests.engine.cache.integrity import check_integrity
from tests.engine.tiers.test_tiers_stateful import Pod, make_pod


def pod_of(blocks: int, *, pinned: int = 0) -> Pod:
    """Return an engine whose pool has blocks of 2 tokens; copies end only when the test says so."""
    cache = PrefixCache(blocks, 2, pinned_blocks=pinned)
    return make_pod(cache, (100,), lambda: 0.0, token_s=1.0, rate=1e4, running=4)


def step(pod: Pod) -> bool:
    """Run a step; return False if there is none to run."""
    plan = pod.scheduler.schedule()
    if plan is not None:
        pod.scheduler.complete(pod.backend.run(plan))
        check_integrity(pod.cache)
    return plan is not None


def serve(pod: Pod, request: Request) -> None:
    pod.scheduler.add(request)
    while pod.scheduler.has_work:
        assert step(pod)


def end_copies(pod: Pod) -> None:
    pod.copies[0].end_all()
    pod.tiers.go_on()


@pytest.mark.parametrize(("tokens", "pinned"), [(18, 6), (28, 6), (30, 5)])
def test_what_a_client_asks_for_ends_only_if_no_copy_gives_back_what_is_lacking(tokens: int, pinned: int) -> None:
    pod = pod_of(20, pinned=6)
    serve(pod, Request(0, tuple(range(1, 13)), 1, marks=(CacheMark(12, 100.0),)))
    while pod.tiers.is_busy:
        end_copies(pod)
    serve(pod, Request(1, tuple(range(30, 50)), 1))
    assert pod.cache.pool.available == 4, "ten blocks are being copied"
    large = Request(2, tuple(range(60, 60 + tokens)), 1)
    pod.scheduler.add(large)
    assert not step(pod)
    assert len(pod.cache.pins) == 6
    end_copies(pod)
    assert step(pod)
    assert len(pod.cache.pins) == pinned
    while pod.scheduler.has_work:
        step(pod)
    assert large.output_tokens


def test_copies_that_have_not_begun_give_way_before_a_running_request_does() -> None:
    pod = pod_of(14)
    ended = [Request(number, tuple(range(10 * number, 10 * number + 8)), 1) for number in (1, 2)]
    running = [Request(number, (10 * number, 10 * number + 1), 8) for number in (3, 4)]
    for request in (*running, *ended):
        pod.scheduler.add(request)
    step(pod)
    assert all(request.output_tokens for request in ended)
    assert pod.links[0].copier.open_blocks(Direction.DEMOTE) == 8, "the first four are in flight"
    while pod.scheduler.has_work:
        step(pod)
    assert pod.scheduler.stats().preemptions == 0
    assert all(len(request.output_tokens) == 8 for request in running)
    while pod.tiers.is_busy:
        end_copies(pod)
    assert pod.cache.pool.available == pod.cache.pool.total
