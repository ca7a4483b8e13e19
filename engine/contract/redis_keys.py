"""Names in Redis. One hash tag per model keeps a model's keys in one slot of a Redis Cluster."""

from __future__ import annotations

STREAM_POD_FIELD = b"p"
STREAM_DATA_FIELD = b"d"
STREAM_FETCH_FIELD = b"f"


def stream_key(model: str) -> str:
    """Redis Stream of the model's deltas, all pods: entries {p: pod id, d: encoded delta}, and of engines with tiers
    {f: encoded fetch costs} (`fetch_costs.py`)."""
    return f"warmroute:{{{model}}}:events"


def snapshot_key(model: str, pod_id: str) -> str:
    """String with a pod's encoded snapshot. Its TTL is the pod's lease."""
    return f"warmroute:{{{model}}}:pod:{pod_id}"


def resync_key(model: str, pod_id: str) -> str:
    """Set by a gateway that wants a fresh snapshot of the pod; consumed by the engine's publisher."""
    return f"warmroute:{{{model}}}:resync:{pod_id}"


def shares_key(model: str) -> str:
    """Hash gateway id -> traffic counters and the time of their writing, so that gateways agree on affinity groups."""
    return f"warmroute:{{{model}}}:shares"


def quota_key(tenant: str) -> str:
    """Hash in which gateways keep account of what a tenant has used of its limits."""
    return f"warmroute:{{tenant:{tenant}}}:quota"


def place_key(name: str) -> str:
    """String with the pod that has a response or a conversation of that name."""
    return f"warmroute:{{{name}}}:place"


BELIEFS_STREAM = "warmroute:{gateways}:beliefs"
"""Redis Stream of what gateways tell each other of pods that publish nothing: entries {d: encoded message}."""


def belief_key(pod_id: str) -> str:
    """String with all that gateways believe of such a pod."""
    return f"warmroute:{{gateways}}:belief:{pod_id}"


LEARNT_KEY = "warmroute:{gateways}:learnt:belief:models"
"""Hash model -> what gateways have learnt of it and its pods. The rule for beliefs allows the name, and it is no
pod's."""


def named_caches_key(tenant: str) -> str:
    """Hash id -> what is said of a tenant's named cache. The rule for beliefs allows the name, and it is no pod's."""
    return f"warmroute:{{tenant:{tenant}}}:named:belief:caches"


def named_cache_key(tenant: str, cache_id: str) -> str:
    """String with the contents of a tenant's named cache. Its TTL is the cache's."""
    return f"warmroute:{{tenant:{tenant}}}:named:belief:cache:{cache_id}"
