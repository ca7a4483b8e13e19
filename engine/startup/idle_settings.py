"""When a setting of the engine has no effect."""

from __future__ import annotations

from engine.common.without_effect import Rule
from engine.startup.settings import EngineSettings

RULES: tuple[Rule[EngineSettings], ...] = (
    Rule(
        lambda given: given.device_kind != "cuda",
        "it works only on device cuda",
        ("kv_memory_share", "attention", "cuda_graphs"),
    ),
    Rule(lambda given: given.device_kind != "cpu", "it works only on device cpu", ("threads",)),
    Rule(lambda given: given.device_kind != "sim", "it works only on device sim", ("sim_profile", "seed")),
    Rule(
        lambda given: given.device_kind == "sim",
        "device sim computes no KV; --kv-pool-tokens sets the size of its pool",
        ("kv_cache_bytes", "dtype"),
    ),
    Rule(
        lambda given: given.device_kind == "sim",
        "device sim only emulates the time that a disk takes",
        ("disk_cache_path",),
    ),
    Rule(
        lambda given: bool(given.kv_pool_tokens),
        "--kv-pool-tokens sets the size of the KV pool",
        ("kv_cache_bytes", "kv_memory_share"),
    ),
    Rule(
        lambda given: bool(given.kv_cache_bytes),
        "--kv-cache-bytes sets the size of the KV pool",
        ("kv_memory_share",),
    ),
    Rule(
        lambda given: given.prefix_cache == "off",
        "--prefix-cache off keeps no KV between requests",
        ("eviction", "pin_share", "pin_min_tokens", "keep_share"),
    ),
    Rule(
        lambda given: not given.pin_share and not given.keep_share,
        "--pin-share and --keep-share are 0, so no prompt is kept",
        ("pin_min_tokens",),
    ),
    Rule(lambda given: given.redis_url is None, "without --redis-url nothing is published", ("lease_s",)),
)
