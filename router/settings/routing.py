"""Settings of the choice of an engine, and of what gateways share for it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.common.settings import Settings, check_redis_url, check_unique, group

PolicyName = Literal[
    "round_robin", "least_loaded", "prefix_hash", "bounded_hash", "cache_aware", "affinity_groups", "predicted_ttft"
]


@group("Routing", common=("policy",))
class RoutingSettings(Settings):
    """How an engine is chosen."""

    policy: PolicyName = Field(
        "predicted_ttft", description="routing policy; change it after warmroute-loadgen compare has shown a better one"
    )
    allow_policy_header: bool = Field(
        False,
        description="to compare policies on live traffic: a request may name its policy in x-warmroute-policy, and "
        "(for conformance tests of the picker) its endpoint in test-epp-endpoint-selection",
    )
    shadow_policies: list[PolicyName] = Field(
        [],
        json_schema_extra={"uniqueItems": True},
        description="before a change of policy: policies that are asked about every request and never followed; "
        "metrics show what each would choose with the caches and loads that --policy leads to",
    )
    resume_streams: bool = Field(
        True,
        description="when an engine breaks a stream, ask another one for the rest; switch it off if each answer must "
        "come from one engine: the stream then ends in an error event",
    )
    hedge_after_s: float = Field(
        0.0,
        ge=0,
        description="for a low tail latency: after so long without a token of a stream, and at least twice its "
        "predicted time to the first token, ask a second engine too (at most 2 % of requests); the p99 of the time to "
        "the first token is a good value; 0: never",
    )

    @field_validator("shadow_policies")
    @classmethod
    def _check_shadow_policies(cls, names: list[PolicyName]) -> list[PolicyName]:
        check_unique(names)
        return names

    @model_validator(mode="after")
    def _check_shadows_differ(self) -> Self:
        if self.policy in self.shadow_policies:
            raise ValueError(
                f"--shadow-policies has {self.policy}, which is the --policy that acts: leave it out, or choose another"
            )
        return self


@group("Redis", common=("redis_url",))
class RedisSettings(Settings):
    """What is shared through Redis."""

    redis_url: str | None = Field(
        None,
        description="the Redis that bundled engines publish to, and through which several gateways share limits and "
        "what they know; redis://, rediss://, unix:// or redis+sentinel://HOST:26379,HOST:26379/MASTER",
    )
    named_caches: int = Field(
        100,
        ge=0,
        le=10_000,
        description="named caches (/v1/caches) that a tenant may have, in Redis or else in this gateway's memory; "
        "0, where prompts must not be stored: none",
    )

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None) -> str | None:
        return url if url is None else check_redis_url(url)
