"""When a setting of the gateway has no effect."""

from __future__ import annotations

from engine.common.without_effect import Rule
from router.settings.gateway import GatewaySettings, PolicyName


def _decides(settings: GatewaySettings, *policies: PolicyName) -> bool:
    """Return whether a request may be routed by one of the policies, or one of them may be a shadow policy."""
    return settings.allow_policy_header or bool({settings.policy, *settings.shadow_policies} & set(policies))


RULES: tuple[Rule[GatewaySettings], ...] = (
    Rule(
        lambda given: not _decides(given, "prefix_hash", "bounded_hash"),
        "only the policies prefix_hash and bounded_hash use it",
        ("hash_depth_strides",),
    ),
    Rule(
        lambda given: not _decides(given, "bounded_hash", "affinity_groups"),
        "only the policies bounded_hash and affinity_groups use it",
        ("load_bound",),
    ),
    Rule(
        lambda given: given.redis_url is None,
        "it is about the registry, which needs --redis-url",
        ("lease_s", "share_beliefs", "warm_timeout_s"),
    ),
    Rule(
        lambda given: not given.queue_timeout_s and not given.activation_timeout_s,
        "--queue-timeout-s and --activation-timeout-s are 0, so no request waits",
        ("queue_requests", "queue_mib"),
    ),
    Rule(
        lambda given: not given.engine_metrics,
        "--engine-metrics is false, so no metrics are read",
        ("engine_metrics_path", "engine_metrics_port"),
    ),
    Rule(
        lambda given: given.tenants_file is None,
        "only tenants have isolation, and they need --tenants-file",
        ("tenant_secret_file",),
    ),
)
