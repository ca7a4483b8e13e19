"""Shared beliefs: gateways in front of real vLLM servers reuse as much as one omniscient gateway would."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Sequence

import pytest

from tests.e2e.programs import Program
from tests.redis_server import RedisServer
from tests.vllm.losses import Seen, summary
from tests.vllm.servers import BLOCK_TOKENS, VllmServer
from tests.vllm.table import Cell, gateway, gateways, hits, measure, play
from tests.vllm.workload import Ask, Workload, attainable, shared_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BAR = 0.97
SITTINGS = 3
POLICY = "predicted_ttft"


def is_decided(cells: Sequence[Cell]) -> bool:
    """Whether one more sitting cannot move the median across the bar."""
    passed = sum(cell.share >= BAR for cell in cells)
    return 2 * max(passed, len(cells) - passed) > SITTINGS


@pytest.mark.parametrize(("count", "requests"), [(1, 192), (2, 192), (1, 384), (2, 384)])
def test_gateways_reuse_nearly_all_that_can_be_reused(servers: list[VllmServer], count: int, requests: int) -> None:
    cells: list[Cell] = []
    while not is_decided(cells):
        sitting = len(cells) + 1
        cells.append(measure(servers, POLICY, Workload(requests, count, seed=sitting), sitting))
        print(cells[-1])
    assert statistics.median_low(cell.share for cell in cells) >= BAR, "\n".join(map(str, cells))


def share_of(
    servers: Sequence[VllmServer], asks: Sequence[Ask], since: int, reused: float, seen: Sequence[Seen]
) -> str:
    """Return the reused share of the requests from number `since` on; fail if it is below the bar."""
    prompts = [servers[0].tokenize(ask.prompt) for ask in asks]
    best = attainable(prompts, BLOCK_TOKENS) - attainable(prompts[:since], BLOCK_TOKENS)
    why = "\n    lost ".join(("", *summary(seen, shared_tokens(asks, prompts), best, since)))
    text = f"{reused / best:.1%} of {best} tokens{why}"
    assert reused >= BAR * best, text
    return text


def test_a_new_gateway_knows_what_the_one_before_it_did(servers: list[VllmServer], redis: RedisServer) -> None:
    asks = Workload(384).asks()
    first, second = asks[:192], asks[192:]
    with gateways(servers, 1, POLICY, redis.url) as old:
        before_s = asyncio.run(play(old, first))
        with gateways(servers, 1, POLICY, redis.url) as new:
            assert old[0].stop() == 0
            reused = hits(servers)
            after_s = asyncio.run(play(new, second))
            reused = hits(servers) - reused
    assert {each.number for each in before_s + after_s} == set(range(384))
    believed = sum(each.predicted > 0 for each in after_s if each.number < 192 + 24)
    assert believed >= 20, f"of its first 24 requests the new gateway believed {believed} warm somewhere"
    later = [later_by(each, 1e6) for each in after_s]
    print(share_of(servers, asks, 192, reused, before_s + later))


def later_by(seen: Seen, seconds: float) -> Seen:
    """Return the record on the clock of a cell that began `seconds` earlier."""
    return dataclasses.replace(
        seen, sent_s=seen.sent_s + seconds, first_s=seen.first_s + seconds, ended_s=seen.ended_s + seconds
    )


def test_two_gateways_restarted_in_turn_lose_no_request_and_no_prefix(
    servers: list[VllmServer], redis: RedisServer
) -> None:
    asks = Workload(384, gateways=2, seed=4).asks()
    exits: list[int] = []
    reused = hits(servers)

    async def roll(programs: list[Program]) -> None:
        """Replace gateways as a rollout does: a new gateway is ready and gets the requests before the old one ends."""
        for place in (0, 1, 0, 1):
            await asyncio.sleep(2.0)
            new = await asyncio.to_thread(gateway, servers, POLICY, redis.url)
            everybody.append(new)
            await asyncio.to_thread(new.wait_ready)
            old, programs[place] = programs[place], new
            exits.append(await asyncio.to_thread(old.stop))

    async def under_load(programs: list[Program]) -> list[Seen]:
        rolling = asyncio.create_task(roll(programs))
        try:
            seen = await play(programs, asks)
            await rolling
        finally:
            rolling.cancel()
        return seen

    everybody: list[Program] = []
    try:
        with gateways(servers, 2, POLICY, redis.url) as programs:
            seen = asyncio.run(under_load(list(programs)))
            reused = hits(servers) - reused
    finally:
        for program in everybody:
            program.stop()
    assert exits == [0] * 4
    assert len(seen) == len(asks)
    print(share_of(servers, asks, 0, reused, seen))
