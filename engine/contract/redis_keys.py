"""Names in Redis. One hash tag per model keeps a model's keys in one slot of a Redis Cluster."""

from __future__ import annotations

STREAM_POD_FIELD = b"p"
STREAM_DATA_FIELD = b"d"
STREAM_FETCH_FIELD = b"f"


def stream_key(model: str) -> str:
    """Redis Stream of the deltas of all the model's pods: entries {p: pod id, d: encoded delta}. Entries of engines
    with tiers also have {f: encoded fetch costs} (`fetch_costs.py`)."""
    return f"warmroute:{{{model}}}:events"


def snapshot_key(model: str, pod_id: str) -> str:
    """String with a pod's encoded snapshot. Its TTL is the pod's lease."""
    return f"warmroute:{{{model}}}:pod:{pod_id}"


def resync_key(model: str, pod_id: str) -> str:
    """String that a gateway sets to ask for a fresh snapshot of the pod. The engine's publisher deletes it."""
    return f"warmroute:{{{model}}}:resync:{pod_id}"


def shares_key(model: str) -> str:
    """Hash gateway id -> traffic counters and the time of writing. Gateways use it to agree on affinity groups."""
    return f"warmroute:{{{model}}}:shares"


def quota_key(tenant: str) -> str:
    """Hash in which gateways count a tenant's use of its limits."""
    return f"warmroute:{{tenant:{tenant}}}:quota"


def place_key(name: str) -> str:
    """String with the pod that stores the response or conversation of that name."""
    return f"warmroute:{{{name}}}:place"


PEER_STREAM = "warmroute:{gateways}:beliefs"
"""Redis Stream of gateways' messages to each other about pods that publish nothing: entries {d: encoded message}. Each
message has its version; the name is that of version 1, so that gateways of two releases notice each other."""


def assumed_key(pod_id: str) -> str:
    """String with what gateways assume about a pod that publishes nothing. Version 1 had another name, so that two
    releases do not overwrite each other's. The ACL rule that the first release had allows this name."""
    return f"warmroute:{{gateways}}:assumed:belief:{pod_id}"


LEARNT_KEY = "warmroute:{gateways}:learnt:belief:models"
"""Hash model -> gateways' learnt values for the model and its pods. The ACL rule for `assumed_key` allows
this name, and no pod's key has it."""


def named_caches_key(tenant: str) -> str:
    """Hash id -> description of a tenant's named cache. The ACL rule for `assumed_key` allows this
    name, and no pod's key has it."""
    return f"warmroute:{{tenant:{tenant}}}:named:belief:caches"


def named_cache_key(tenant: str, cache_id: str) -> str:
    """String with the contents of a tenant's named cache. Its TTL is the cache's."""
    return f"warmroute:{{tenant:{tenant}}}:named:belief:cache:{cache_id}"
