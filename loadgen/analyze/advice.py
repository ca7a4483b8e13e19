"""Whether prefix caching is worth its price. Without caching a prompt token costs 1. With caching, a token that is
computed and stored costs `write_cost`, and a token that is found costs `read_cost`. Caching pays if the hit rate is
at least the h that solves (1 - h) write + h read = 1:

    h = (write - 1) / (write - read)

In an engine, storing means hashing each block, which is near 1 % of prefill, and finding is free. Hosted models often
charge for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from loadgen.analyze.model import CacheRate, Finding, Recommendation

_WORTH_ROUTING = 0.02
"""Smallest difference of hit rates at which the advice says that routing matters."""


def break_even_rate(write_cost: float, read_cost: float) -> float:
    """Return the hit rate at which caching becomes cheaper than no caching; above 1: never."""
    return max(0.0, (write_cost - 1) / (write_cost - read_cost))


def recommend(
    caches: Sequence[CacheRate],
    findings: Sequence[Finding],
    possible: float,
    now: float,
    pods: int,
    costs: tuple[float, float],
) -> Recommendation:
    """Return the recommendation for the first of `caches`. `costs`: write and read cost of a token."""
    least = break_even_rate(*costs)
    cache = caches[0]
    size = "an infinite cache" if cache.cache_tokens is None else f"{cache.cache_tokens:,} tokens of cache a pod"
    plain = cache.random_routing if pods > 1 else cache.one_pod
    best = cache.perfect_affinity if pods > 1 else cache.one_pod
    enable = best > least
    sentences = [_verdict(enable, plain, best, least, size, possible, findings, costs)]
    routing: Literal["affinity", "indifferent", "none"] = "none"
    if pods > 1 and enable:
        routing = "affinity" if best - plain >= _WORTH_ROUTING else "indifferent"
        sentences.append(_routing(routing, plain, best, pods))
    sentences += [finding.advice for finding in findings]
    if findings:
        sentences.append(f"With all of this repaired, an infinite cache would hit {possible:.1%} instead of {now:.1%}.")
    return Recommendation(enable=enable, routing=routing, break_even_rate=least, sentences=tuple(sentences))


def _verdict(
    enable: bool,
    plain: float,
    best: float,
    least: float,
    size: str,
    possible: float,
    findings: Sequence[Finding],
    costs: tuple[float, float],
) -> str:
    if enable:
        saved = (1 - best) * costs[0] + best * costs[1]
        only = " only with routing by prefix" if plain <= least else ""
        return (
            f"Enable prefix caching{only}: with {size}, up to {best:.1%} of prompt tokens need not be computed;"
            f" caching pays off from a hit rate of {least:.1%} on (at best, prompts cost {saved:.2f} of what they cost"
            " without it)."
        )
    text = (
        f"Prefix caching does not pay off for these prompts: with {size}, at best {best:.1%} of prompt tokens hit;"
        f" caching pays off from {least:.1%} on."
    )
    if findings and possible > least:
        return f"{text} Repair the prompts first, then enable caching:"
    if possible > least:
        return f"{text} The prompts do share prefixes, but the cache is too small to hold them until they recur."
    return f"{text} The prompts share too little; leave caching off, or on if it costs nothing."


def _routing(routing: str, plain: float, best: float, pods: int) -> str:
    rates = f"{pods} pods reach {plain:.1%} with random routing and at best {best:.1%} with affinity."
    return f"Route by prefix: {rates}" if routing == "affinity" else f"Routing by prefix would gain little: {rates}"
