"""A real vLLM with two data-parallel ranks is two targets, each with a cache of its own."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engine.contract import headers
from tests.e2e.programs import Program
from tests.redis_server import RedisServer
from tests.vllm.conftest import StartServers
from tests.vllm.servers import BLOCK_TOKENS, MODEL, ServerSpec, VllmServer
from tests.vllm.table import gateways, hits, play
from tests.vllm.workload import Workload, attainable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RANKS = 2
BAR = 0.97
POOL = ServerSpec(blocks=640, flags=("--data-parallel-size", str(RANKS)))


@pytest.fixture(scope="module")
def ranked(start_servers: StartServers) -> Iterator[VllmServer]:
    """One server with two ranks, each with room for 20,480 tokens."""
    with start_servers(POOL) as (server,):
        yield server


def shown(gateway: Program) -> list[dict[str, Any]]:
    """Return what the gateway reports about its targets."""
    with urllib.request.urlopen(f"{gateway.admin}/v1/pods", timeout=10.0) as answer:
        pods: list[dict[str, Any]] = json.loads(answer.read())["pods"]
    return pods


def pods(gateway: Program) -> set[str]:
    """Return the names of the targets that the gateway knows."""
    return {str(pod["pod"]) for pod in shown(gateway)}


def wait_for(gateway: Program, targets: set[str], deadline_s: float = 60.0) -> None:
    """Wait for the targets: the engine's metrics show its ranks a moment after the first probe."""
    give_up_at = time.monotonic() + deadline_s
    while (known := pods(gateway)) != targets:
        assert time.monotonic() < give_up_at, f"the gateway knows {known}"
        time.sleep(0.1)


def test_ranks_are_found_and_each_prefix_keeps_to_one(ranked: VllmServer, redis: RedisServer) -> None:
    asks = Workload(96, prefixes=12).asks()
    name = ranked.url.removeprefix("http://")
    targets = {f"{name}/{rank}" for rank in range(RANKS)}
    with gateways([ranked], 1, "predicted_ttft", redis.url) as programs:
        wait_for(programs[0], targets)
        before = hits([ranked])
        seen = asyncio.run(play(programs, asks))
        reused = hits([ranked]) - before
    assert {each.pod for each in seen} == targets
    copies = Counter(prefix for prefix, _ in {(each.prefix, each.pod) for each in seen})
    best = attainable([ranked.tokenize(ask.prompt) for ask in asks], BLOCK_TOKENS)
    assert reused >= BAR * best, f"{reused / best:.1%} of {best} tokens; ranks that each prefix went to: {copies}"


def served(server: VllmServer) -> Counter[str]:
    """Return how many requests each rank has ended, by vLLM's own count."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30.0) as answer:
        page = answer.read().decode()
    counts: Counter[str] = Counter()
    for rank, value in re.findall(r'^vllm:request_success_total\{engine="(\d+)".*\} (\S+)$', page, re.MULTILINE):
        counts[rank] += int(float(value))
    return counts


def test_a_request_is_computed_by_the_rank_that_the_gateway_names(ranked: VllmServer, redis: RedisServer) -> None:
    name = ranked.url.removeprefix("http://")
    with gateways([ranked], 1, "round_robin", redis.url) as (gateway,):
        wait_for(gateway, {f"{name}/{rank}" for rank in range(RANKS)})
        for pod in shown(gateway):
            facts = pod["engine"]
            assert (facts["kv_capacity_tokens"], facts["block_tokens"], facts["ranks"]) == (
                POOL.tokens,
                BLOCK_TOKENS,
                2,
            )
        before, named = served(ranked), Counter[str]()
        for number in range(9):
            request = urllib.request.Request(
                f"{gateway.url}/v1/completions",
                json.dumps({"model": MODEL, "prompt": f"Entry {number}.", "max_tokens": 1}).encode(),
                {"Content-Type": "application/json", headers.DATA_PARALLEL_RANK: "0"},  # a client's header is dropped
            )
            with urllib.request.urlopen(request, timeout=120.0) as answer:
                answer.read()
                named[answer.headers[headers.POD].rpartition("/")[2]] += 1
        assert sorted(named.values()) == [4, 5]
        assert served(ranked) - before == named
