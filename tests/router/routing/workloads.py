"""Traffic for the emulated fleet; every list is a function of its seed."""

from __future__ import annotations

import random
from itertools import accumulate

from engine.contract.keys import PrefixKey
from tests.router.routing.fleet import Arrival

Keys = tuple[PrefixKey, ...]


def _keys(rng: random.Random, count: int) -> Keys:
    return tuple(PrefixKey(rng.getrandbits(64)) for _ in range(count))


def _times(rng: random.Random, count: int, per_s: float) -> list[float]:
    return list(accumulate(rng.expovariate(per_s) for _ in range(count)))


def shared_prompt(per_s: float, count: int = 1200, seed: int = 1) -> list[Arrival]:
    """80 % of requests share a system prompt of 1,500 tokens. The others have one of 60 rare prompts of that length."""
    rng = random.Random(seed)
    popular = _keys(rng, 24)
    rare = [_keys(rng, 24) for _ in range(60)]
    return [
        Arrival(at_s, (popular if rng.random() < 0.8 else rng.choice(rare)) + _keys(rng, rng.randint(2, 10)))
        for at_s in _times(rng, count, per_s)
    ]


def tenant_chat(per_s: float, count: int = 1200, seed: int = 2, tenants: int = 40) -> list[Arrival]:
    """Conversations of up to 5 turns, each of which resends the history. Tenants have Zipf popularity and one system
    prompt each.

    All tenants share their first stride, as requests of one product do.
    """
    rng = random.Random(seed)
    first = _keys(rng, 1)
    systems = [first + _keys(rng, rng.randint(20, 32)) for _ in range(tenants)]
    weights = [1 / (rank + 1) for rank in range(tenants)]
    arrivals = []
    for start_s in _times(rng, count // 3, per_s / 3):
        at_s, keys = start_s, rng.choices(systems, weights)[0]
        for _ in range(rng.choice((1, 2, 3, 3, 4, 5))):
            keys += _keys(rng, rng.randint(1, 5))
            arrivals.append(Arrival(at_s, keys))
            keys += _keys(rng, 2)
            at_s += 2 + rng.expovariate(0.25)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def burst(groups: int = 12, size: int = 24, seed: int = 3) -> list[Arrival]:
    """Within 0.2 s, `size` requests come for each of `groups` new prefixes of 4,000 tokens."""
    rng = random.Random(seed)
    prefixes = [_keys(rng, 64) for _ in range(groups)]
    arrivals = [Arrival(rng.uniform(0, 0.2), prefix + _keys(rng, 3)) for prefix in prefixes for _ in range(size)]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def nothing_shared(per_s: float, count: int = 1200, seed: int = 4) -> list[Arrival]:
    """Prompts of 200 to 8,000 tokens, mostly short, without a common stride."""
    rng = random.Random(seed)
    lengths = (min(128, 3 + int(rng.paretovariate(1.1) * 6)) for _ in range(count))
    return [Arrival(at_s, _keys(rng, length)) for at_s, length in zip(_times(rng, count, per_s), lengths, strict=True)]
