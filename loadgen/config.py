"""Settings of the traffic and of a comparison: every flag with unit and default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from engine.contract.settings import Settings
from loadgen.arrivals import ArrivalKind, ArrivalSpec
from loadgen.workload import Range, WorkloadSpec


def _check_policies(policies: list[str]) -> list[str]:
    if not policies or not all(policies):
        raise ValueError("must name at least one policy, and no empty one")
    twice = sorted({name for name in policies if policies.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is listed twice")
    return policies


Policies = Annotated[list[str], AfterValidator(_check_policies)]


class TrafficSettings(Settings):
    """What is sent, and when. The same settings and seed give the same schedule and the same prompts."""

    config: str | None = Field(None, description="YAML file with any of these settings")
    seed: int = Field(1, description="decides prompts and schedule")

    tenants: int = Field(8, ge=1, le=10_000, description="system prompts, each shared by the sessions of one tenant")
    zipf: float = Field(0.8, ge=0, le=5, description="popularity of tenant i is i ** -zipf; 0: all alike")
    system_tokens_min: int = Field(1500, ge=1, description="shortest system prompt, tokens (approximately)")
    system_tokens_max: int = Field(2000, ge=1, description="longest system prompt, tokens (approximately)")
    question_tokens_min: int = Field(20, ge=1, description="shortest user turn, tokens (approximately)")
    question_tokens_max: int = Field(60, ge=1, description="longest user turn, tokens (approximately)")
    turns_min: int = Field(2, ge=1, description="fewest turns of a session")
    turns_max: int = Field(4, ge=1, description="most turns of a session")
    think_s: float = Field(1.0, ge=0, description="mean seconds between an answer and the session's next question")
    unique_share: float = Field(
        0.0, ge=0, le=1, description="share of sessions that are one long question with no shared prefix, 0 to 1"
    )
    output_tokens: int = Field(32, ge=1, description="max_tokens of each request")
    ignore_eos: bool = Field(
        True, description="ask for exactly output_tokens (ignore_eos); off for servers that refuse the field"
    )
    tokens_per_word: float = Field(
        0.0,
        ge=0,
        le=100,
        description="tokens per word of the model's tokenizer; 0: measured at start",
    )

    arrival: Literal["poisson", "constant", "burst", "closed"] = Field(
        "poisson", description="how sessions arrive; closed: as many at a time as --concurrency says"
    )
    session_rate: float = Field(1.0, gt=0, description="sessions per second (not for closed)")
    burst_size: int = Field(10, ge=1, description="sessions at the same instant (burst only)")
    concurrency: int = Field(8, ge=1, description="sessions at a time (closed only)")
    sessions: int = Field(50, ge=1, le=1_000_000, description="sessions of each arm")
    time_limit_s: float = Field(300.0, gt=0, description="seconds after which an arm is cut off")
    request_timeout_s: float = Field(60.0, gt=0, description="seconds a request may take as a whole")
    warmup_requests: int = Field(8, ge=1, le=1000, description="short requests before each arm, not counted")
    settle_s: float = Field(1.0, ge=0, description="seconds of rest between emptying the caches and an arm")

    @model_validator(mode="after")
    def _check_ranges(self) -> TrafficSettings:
        for name in ("system_tokens", "question_tokens", "turns"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ValueError(f"--{name.replace('_', '-')}-min {low} is above --{name.replace('_', '-')}-max {high}")
        return self

    def workload(self, tokens_per_word: float) -> WorkloadSpec:
        """The prompts, with sizes turned from tokens into words."""
        system = Range(self.system_tokens_min, self.system_tokens_max)
        question = Range(self.question_tokens_min, self.question_tokens_max)
        return WorkloadSpec(
            seed=self.seed,
            tenants=self.tenants,
            zipf=self.zipf,
            system_words=system.scaled(1 / tokens_per_word),
            question_words=question.scaled(1 / tokens_per_word),
            turns=Range(self.turns_min, self.turns_max),
            think_s=self.think_s,
            unique_share=self.unique_share,
        )

    def arrivals(self) -> ArrivalSpec:
        """When sessions begin."""
        return ArrivalSpec(ArrivalKind(self.arrival), self.session_rate, self.burst_size, self.concurrency)


class CompareSettings(TrafficSettings):
    """Flags, `WARMROUTE_*` environment and YAML keys of `warmroute-loadgen compare`."""

    url: str = Field(
        description="base URL of a gateway that runs with --allow-policy-header, e.g. http://127.0.0.1:8080"
    )
    policies: Policies = Field(
        ["round_robin", "least_loaded", "affinity_groups", "predicted_ttft"],
        description="routing policies to compare, comma-separated, one arm each, in this order",
    )
    model: str | None = Field(None, description="model to name in requests; none: the first of /v1/models")
    out: str = Field("out/compare", description="folder for result.json and report.html")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url.rstrip("/")
