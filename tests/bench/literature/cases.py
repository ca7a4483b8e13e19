"""The cases: the workloads of the three tables, and the fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.scenario import Scenario
from loadgen.workloads.base import Workload
from loadgen.workloads.chat import Chat
from loadgen.workloads.code import CodeCompletion
from loadgen.workloads.rag import Rag
from loadgen.workloads.single import Batch, Diverse

PODS = 8
PROFILE = "h100-8b"

SHARED = 0.8
"""Share of requests under the single system prompt."""
SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 2048, 128, 256
SHAPE_ARMS = ("round_robin", "prefix_hash", "cache_aware", "affinity_groups", "predicted_ttft")
SHAPE_RATE = 60.0
"""Requests per second."""

LOAD = 0.7
"""Share of what the busy fleet serves without caching; every arm of a workload is offered this load."""
NO_CACHE = "no caching"
WORKLOAD_ARMS = (NO_CACHE, "round_robin", "predicted_ttft")

SHARING_LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
SHARING_PREFIXES = 100
SHARING_PROMPT_TOKENS = 2048
SHARING_KV_TOKENS = 41_000
"""A tenth of the profile's value: all prefixes together fill 5 pods' caches, so routing matters."""
CONCURRENCY = 16 * PODS
"""Concurrent sessions that keep the fleet busy."""
LEAST_UNIQUE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """One workload of the second table."""

    name: str
    about: str
    workload: Callable[[int], Workload]
    """Returns the workload for a seed."""


KINDS = (
    Kind(
        "single system prompt",
        "2,000 tokens for all, a question of 100, an answer of 100",
        lambda seed: _single_turn("single", seed, tenants=1, system=2000, question=100),
    ),
    Kind(
        "10 tenants",
        "10 system prompts of 2,000 tokens, equally popular, a question of 100, an answer of 100",
        lambda seed: _single_turn("ten", seed, tenants=10, system=2000, question=100),
    ),
    Kind(
        "RAG documents",
        "4 of 200 documents of 600 tokens each, Zipf 1, in fixed order, an answer of 100",
        lambda seed: Rag("rag", seed, rag_order="fixed", output_tokens=100),
    ),
    Kind(
        "multi-turn of 5+",
        "5 to 10 turns of 40 to 200 tokens, answers of 128, 5 s of thought, a system prompt of 100",
        lambda seed: Chat("multi-turn", seed, 1, 0.0, 100, 100, 40, 200, 5, 10, 5.0, output_tokens=128),
    ),
    Kind(
        "code completion",
        "a repository's 3,000 tokens, a file that grows, 4 to 12 requests a second apart, answers of 32",
        lambda seed: CodeCompletion("code", seed),
    ),
    Kind(
        "batch, shared instructions",
        "jobs of 100 items of 100 to 400 tokens under 600 of instructions, answers of 32",
        lambda seed: Batch("batch", seed),
    ),
    Kind(
        "diverse prompts", "200 to 2,000 tokens, nothing shared, answers of 64", lambda seed: Diverse("diverse", seed)
    ),
)


def shape(seed: int, requests: int) -> Scenario:
    """Return the first table's scenario: 80 % of requests share one system prompt, the rest are unique and as long."""
    chat = _single_turn("80 % share one prompt", seed, 1, SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS, 1 - SHARED)
    return Scenario(FleetSpec(emulated_pods(PODS, PROFILE)), chat, poisson(SHAPE_RATE), requests, seed)


def by_workload(kind: Kind, seed: int, sessions: int, rate: float) -> Scenario:
    """Return the second table's scenario, at `rate` sessions per second."""
    return Scenario(FleetSpec(emulated_pods(PODS, PROFILE)), kind.workload(seed), poisson(rate), sessions, seed)


def sharing(level: float, seed: int, requests: int) -> Scenario:
    """Return the third table's scenario: requests keep the fleet busy; a share `level` of each prompt is shared."""
    unique = max(LEAST_UNIQUE_TOKENS, round((1 - level) * SHARING_PROMPT_TOKENS))
    shared = max(1, SHARING_PROMPT_TOKENS - unique)
    chat = _single_turn("sharing", seed, SHARING_PREFIXES, shared, unique, 128)
    fleet = FleetSpec(emulated_pods(PODS, PROFILE, kv_tokens=SHARING_KV_TOKENS))
    return Scenario(fleet, chat, closed(), requests, seed)


def without_caching(scenario: Scenario) -> Scenario:
    """Return the same scenario on pods that cache no prefixes."""
    pods = tuple(replace(pod, reuses=False) for pod in scenario.fleet.pods)
    return replace(scenario, fleet=replace(scenario.fleet, pods=pods))


def unthinking(workload: Workload) -> Workload:
    """Return the same workload without pauses."""
    return replace(workload, think_s=0.0) if isinstance(workload, Chat | CodeCompletion) else workload


def closed() -> ArrivalSpec:
    """Return arrivals of as many concurrent sessions as keep the fleet busy."""
    return ArrivalSpec(ArrivalKind.CLOSED, concurrency=CONCURRENCY)


def poisson(rate: float) -> ArrivalSpec:
    """Return arrivals of `rate` sessions per second."""
    return ArrivalSpec(ArrivalKind.POISSON, rate)


def _single_turn(
    name: str, seed: int, tenants: int, system: int, question: int, output: int = 100, unique_share: float = 0.0
) -> Chat:
    return Chat(
        name,
        seed,
        tenants,
        0.0,
        system,
        system,
        question,
        question,
        1,
        1,
        unique_share=unique_share,
        output_tokens=output,
    )
