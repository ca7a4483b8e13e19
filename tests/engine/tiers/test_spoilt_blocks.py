"""A block that cannot be read stays indexed until it is written again. No deeper tier gets what it holds meanwhile."""

from __future__ import annotations

from typing import Any, cast

import pytest

from engine.cache.prefix_cache import PrefixCache
from engine.sched.request import Request
from engine.tiers.link import PAUSE_S
from engine.tiers.stores.place import Place
from tests.engine.tiers.folder_model import FolderModel
from tests.engine.tiers.test_tiers_stateful import Pod, make_pod

PROMPT = tuple(range(3, 16))
BLOCKS = (len(PROMPT) - 1) // 2
LONGER = (*PROMPT, *range(20, 27))


def serve(pod: Pod, number: int, failing: int | None, prompt: tuple[int, ...] = PROMPT, *, fails: bool = False) -> None:
    """Answer the prompt from an empty pool. Copies between pool and host fail if they touch the host's block
    `failing`. `fails`: copies between host and disk fail."""
    pod.cache.reset()
    pod.scheduler.add(Request(number, prompt, 1))
    while pod.scheduler.has_work or pod.tiers.is_busy:
        if pod.side is not None:
            pod.side.answer_all()
        plan = pod.scheduler.schedule()
        if plan is not None:
            pod.scheduler.complete(pod.backend.run(plan))
        for depth, copies in enumerate(pod.copies):
            for flying in tuple(copies.flying):  # `end` fails the test if what is copied is invalid
                host = [block for pair in flying.run.pairs for block in pair]
                cast(Any, copies).end(flying, fails=failing in host if depth == 0 else fails and depth == 1)
        pod.tiers.go_on()


@pytest.mark.parametrize("spoilt", range(BLOCKS))
@pytest.mark.parametrize("prompt", [PROMPT, LONGER])
def test_what_cannot_be_read_goes_no_deeper_until_it_is_written_again(spoilt: int, prompt: tuple[int, ...]) -> None:
    now_s = [0.0]
    pod = make_pod(PrefixCache(60, 2), (100, 100), lambda: now_s[0], token_s=1.0, rate=1e4, running=4)
    host, disk = (link.lower for link in pod.links)
    serve(pod, 0, None)
    block = host.find(host.open(PROMPT), BLOCKS)[spoilt]
    disk.reset()
    serve(pod, 1, block, prompt)
    assert pod.links[0].spoilt == {block}
    assert len(disk.find(disk.open(prompt), 20)) == spoilt
    now_s[0] += PAUSE_S
    serve(pod, 2, None, prompt)
    assert not pod.links[0].spoilt
    assert len(disk.find(disk.open(prompt), 20)) == len(prompt) // 2


def test_what_a_fetch_has_written_can_be_read() -> None:
    """The disk fails, loses its blocks, and gets them again from the folder, under the same numbers."""
    pod = make_pod(PrefixCache(60, 2), (100, 100), lambda: 0.0, token_s=1.0, rate=1e4, running=4, folder=FolderModel())
    host, disk, _ = (link.lower for link in pod.links)
    serve(pod, 0, None)
    pod.links[1].paused_until_s = PAUSE_S
    host.reset()
    serve(pod, 1, None, fails=True)
    assert len(pod.links[1].spoilt) == BLOCKS
    host.reset()
    disk.reset()
    serve(pod, 2, None)
    assert pod.tiers.stats.promoted[Place.SHARED] == BLOCKS
    assert pod.links[1].readable_blocks(disk.open(PROMPT), 2 * BLOCKS) == (BLOCKS, False)
