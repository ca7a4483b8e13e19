"""Settings that earlier releases had and this one does not, each with what does its work now. The next release drops
this table."""

from __future__ import annotations

from collections.abc import Mapping

_FIXED = "leave it out. It is a constant now (engine/startup/constants.py)"

REMOVED: Mapping[str, str] = {
    "admin_host": "give the address in --admin-port, as HOST:PORT",
    "eviction": f"{_FIXED}: lfu",
    "lease_s": f"{_FIXED}: 10 s",
    "log_level": "leave it out. The engine writes few lines, at level info and above",
    "max_waiting": f"{_FIXED}: 1024; gateways let requests wait before they send them",
    "pin_min_tokens": f"{_FIXED}: 1024",
    "pin_share": f"{_FIXED}: 0.25 of the KV pool",
    "seed": "leave it out. The answers of device sim depend on the seed of each request",
    "step_deadline_s": f"{_FIXED}: 300 s",
    "stride": "leave it out. Prefix keys have 256 bytes everywhere",
    "text_threads": f"{_FIXED}: 2",
    "token_cache_mib": f"{_FIXED}: 64 MiB",
}
