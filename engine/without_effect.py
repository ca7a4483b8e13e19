"""Which of the given settings have no effect, because of other settings. The engine warns of them when it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.config import EngineSettings

_When = Callable[[EngineSettings], bool]

_RULES: tuple[tuple[_When, str, tuple[str, ...]], ...] = (
    (
        lambda given: given.device_kind != "cuda",
        "it works only on device cuda",
        ("kv_memory_share", "attention", "cuda_graphs"),
    ),
    (lambda given: given.device_kind != "cpu", "it works only on device cpu", ("threads",)),
    (lambda given: given.device_kind != "sim", "it works only on device sim", ("sim_profile", "seed")),
    (
        lambda given: given.device_kind == "sim",
        "device sim computes no KV; --kv-pool-tokens sets the size of its pool",
        ("kv_cache_bytes", "dtype"),
    ),
    (
        lambda given: given.device_kind == "sim",
        "device sim only emulates the time that a disk takes",
        ("disk_cache_path",),
    ),
    (
        lambda given: bool(given.kv_pool_tokens),
        "--kv-pool-tokens sets the size of the KV pool",
        ("kv_cache_bytes", "kv_memory_share"),
    ),
    (
        lambda given: bool(given.kv_cache_bytes),
        "--kv-cache-bytes sets the size of the KV pool",
        ("kv_memory_share",),
    ),
    (
        lambda given: given.prefix_cache == "off",
        "--prefix-cache off keeps no KV between requests",
        ("eviction", "pin_share", "pin_min_tokens", "keep_share"),
    ),
    (
        lambda given: not given.pin_share and not given.keep_share,
        "--pin-share and --keep-share are 0, so no prompt is kept",
        ("pin_min_tokens",),
    ),
    (lambda given: given.redis_url is None, "without --redis-url nothing is published", ("lease_s",)),
)


def without_effect(settings: EngineSettings) -> Iterator[str]:
    """Yield a sentence for each setting that was given a value other than its default and has no effect."""
    named: set[str] = set()
    for applies, reason, names in _RULES:
        for name in names:
            if name in named or not applies(settings):
                continue
            if getattr(settings, name) != EngineSettings.model_fields[name].default:
                named.add(name)
                yield f"--{name.replace('_', '-')} has no effect: {reason}"
