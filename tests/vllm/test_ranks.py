"""A real vLLM with two data-parallel ranks: the gateway finds them, sends each prefix to one, and vLLM has it there."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from engine.contract import headers
from tests.e2e.programs import Program
from tests.redis_server import RedisServer
from tests.vllm.conftest import StartServers
from tests.vllm.servers import MODEL, ServerSpec, VllmServer
from tests.vllm.table import gateways

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RANKS = 2
PREFIXES = [f"Ledger {number}. " + f"Entry of book {number} is settled. " * 60 for number in range(8)]
FOUND_S = 60.0
"""For a gateway to read the server's metrics; at once, where the machine is not busy."""


@pytest.fixture(scope="module")
def server(start_servers: StartServers) -> Iterator[VllmServer]:
    """One server with two ranks of 640 blocks each."""
    with start_servers(ServerSpec(flags=("--data-parallel-size", str(RANKS)))) as (server,):
        yield server


@pytest.fixture
def program(server: VllmServer, redis: RedisServer) -> Iterator[Program]:
    """A gateway that has found the ranks."""
    server.reset_cache()
    with gateways([server], 1, "predicted_ttft", redis.url) as (program,):
        give_up_at = time.monotonic() + FOUND_S
        while len(pods(program)) < RANKS:
            assert time.monotonic() < give_up_at, pods(program)
            time.sleep(0.1)
        yield program


def pods(program: Program) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{program.admin}/v1/pods", timeout=30.0) as answer:
        shown: list[dict[str, Any]] = json.loads(answer.read())["pods"]
    return shown


def ask(program: Program, prompt: str) -> tuple[str, int]:
    """The pod that answered, and the prompt tokens that it reused."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0.0}
    request = urllib.request.Request(
        f"{program.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", headers.DATA_PARALLEL_RANK: "0"},
    )
    with urllib.request.urlopen(request, timeout=120.0) as answer:
        usage = json.loads(answer.read())["usage"]
        return answer.headers[headers.POD], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def computed(server: VllmServer) -> list[int]:
    """Requests that each rank has ended, by vLLM's own count."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30.0) as answer:
        page = answer.read().decode()
    counts = [0] * RANKS
    for rank, value in re.findall(r'^vllm:request_success_total\{engine="(\d+)".*\} (\S+)$', page, re.MULTILINE):
        counts[int(rank)] += int(float(value))
    return counts


def test_ranks_are_found_with_the_capacity_of_each(program: Program, server: VllmServer) -> None:
    name = server.url.removeprefix("http://")
    shown = pods(program)
    assert [pod["pod"] for pod in shown] == [f"{name}/{rank}" for rank in range(RANKS)]
    for rank, pod in enumerate(shown):
        about = pod["engine"]
        assert (about["engine"], about["rank"], about["ranks"]) == ("vllm", rank, RANKS)
        assert (about["kv_capacity_tokens"], about["block_tokens"]) == (server.spec.tokens, 32)


def test_each_prefix_is_computed_once_and_where_the_gateway_says(program: Program, server: VllmServer) -> None:
    before = computed(server)
    first = {prompt: ask(program, f"{prompt} Question 0?") for prompt in PREFIXES}
    assert {pod for pod, _ in first.values()} == {pod["pod"] for pod in pods(program)}, "both ranks work"
    again = {prompt: [ask(program, f"{prompt} Question {number}?") for number in (1, 2)] for prompt in PREFIXES}
    for prompt, answers in again.items():
        for pod, cached in answers:
            assert pod == first[prompt][0]
            assert cached > 300, "blocks of the other rank are no use here"
    sent = [0] * RANKS
    for pod, _ in [*first.values(), *(answer for answers in again.values() for answer in answers)]:
        sent[int(pod.rpartition("/")[2])] += 1
    assert [after - earlier for earlier, after in zip(before, computed(server), strict=True)] == sent
