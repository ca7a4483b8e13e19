"""The result of a command: what JSON carries and every other output is rendered from.

A report is drawn from this alone, so `warmroute-loadgen report` redraws an old result. Latencies are milliseconds
(`_ms`), all other times seconds (`_s`); rates are per second; shares are 0 to 1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT = "warmroute-result/1"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Interval(_Model):
    """An estimate and the ends of its confidence interval; the ends are None where there is nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None


class Distribution(_Model):
    """Of completed requests. All None where nothing was measured."""

    mean_ms: float | None = None
    median_ms: float | None = None
    std_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    percentiles_ms: dict[str, float] = Field(default_factory=dict)
    """Further ones asked for: '99.9' -> value."""
    cdf_ms: tuple[float, ...] = ()
    """Quantiles 0, 1, .. 100 %; empty where not drawn."""
    with_failures_p99_ms: float | None = None
    """p99 where a failed request counts as infinitely slow; None: more than 1 % failed, the percentile is infinite."""


class PodShare(_Model):
    """One pod's part."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    mean_in_flight: float = 0.0
    max_in_flight: int = 0
    counted_prompt_tokens: int | None = None
    """The pod's own counters over the run (vllm:prefix_cache_queries_total); None: not scraped."""
    counted_cached_tokens: int | None = None


class TimeSeries(_Model):
    """Values per bucket of time and pod."""

    bucket_s: float
    in_flight: dict[str, tuple[float, ...]]
    """Pod -> mean requests in flight in each bucket."""
    cached_token_rate: dict[str, tuple[float | None, ...]]
    """Pod -> cached / prompt tokens of the requests that got their first token in the bucket; None: there were none."""
    request_rate: tuple[float, ...] = ()
    """Offered requests per second in each bucket, all pods."""


class Reuse(_Model):
    """How much was reused, and how much could have been."""

    cached_token_rate: float | None
    """Cached / prompt tokens as usage says; None: the server reported none."""
    counted_rate: float | None = None
    """The same from the pods' counters; None: not scraped."""
    counters_agree: bool | None = None
    """Whether both agree within 1 point; None: nothing to compare."""
    attainable_rate: float | None = None
    """An infinite shared cache, given the prompts in the order they were sent, in bytes of whole strides."""
    achieved_share: float | None = None
    """cached_token_rate / attainable_rate, at most 1 unless `exceeds_attainable`."""
    exceeds_attainable: bool = False
    """More was cached than the run's own prompts can have left: the caches were not empty when it began."""
    duplicate_prompts: int = 0
    """Requests whose whole prompt had been sent before in the run."""
    duplicated_prefill_tokens: int | None = None
    """Estimated tokens that were prefilled though some pod had computed them before."""


class Goodput(_Model):
    """Share and rate of offered requests that met every objective; failures and refusals do not."""

    objectives_ms: dict[str, float]
    share: float
    request_goodput: float


class Validity(_Model):
    """Whether the generator measured the server or itself."""

    valid: bool
    reasons: tuple[str, ...] = ()
    is_late: bool = False
    """A reason is the generator's lag."""
    lag_share: float | None = None
    """The largest part of a TTFT figure (mean, median, p90, p99) that the generator's lag may be; None: no TTFT."""
    lag_share_of: str = ""
    """The figure that `lag_share` is of."""
    lag_p99_share: float | None = None
    """p99 of the generator's lag / median TTFT."""


class Summary(_Model):
    """The numbers of one arm, or of one block of it."""

    planned: int
    completed: int
    failed: int
    not_sent: int
    failures: dict[str, int]
    failure_details: dict[str, str] = Field(default_factory=dict)
    """One example for each kind of failure, in the server's words."""
    duration_s: float
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_concurrent_requests: int
    max_output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Distribution
    """From the intended send time."""
    ttft_from_send: Distribution
    """From the actual send time, as other tools have it."""
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    """From the intended send time."""
    e2e_from_send: Distribution = Field(default_factory=Distribution)
    """From the actual send time, as other tools have it; all None: not measured."""
    lag: Distribution
    imbalance: float | None
    """Largest / mean over the pods of mean requests in flight; None: no answer named its pod."""
    request_imbalance: float | None
    """Largest / mean over the pods of the number of requests."""
    jain_index: float | None
    """(sum x)^2 / (n sum x^2) over the pods' mean requests in flight: 1 balanced, 1/n one has all."""
    pods: dict[str, PodShare]
    reuse: Reuse
    goodput: Goodput | None = None
    validity: Validity
    series: TimeSeries | None = None


class Contrast(_Model):
    """An arm against the baseline in one metric; ratio = arm / baseline, difference = arm - baseline."""

    metric: str
    """A name of `experiment.metrics_compared`, such as ttft_mean_ms."""
    better: Literal["lower", "higher"]
    baseline: str
    arm: str
    pairs: int
    difference: Interval
    ratio: Interval
    judgement: Literal["better", "worse", "not distinguishable"]


class Arm(_Model):
    """One policy, deployment or rate."""

    name: str
    url: str
    policy: str = ""
    summary: Summary
    blocks: tuple[Summary, ...] = ()
    """Each time the arm ran, in order; their series and cdfs are left out."""
    ttft_cdf_low_ms: tuple[float, ...] = ()
    """Ends of the band around the TTFT's quantiles 0, 1, .. 100 %, from the blocks; empty with one block."""
    ttft_cdf_high_ms: tuple[float, ...] = ()


class SweepPoint(_Model):
    """One step of a sweep."""

    arm: str
    rate: float | None
    """Offered requests per second; None: a sweep over concurrency."""
    concurrency: int | None
    summary: Summary
    saturated: bool


class Result(_Model):
    """What a command found."""

    format: Literal["warmroute-result/1"] = "warmroute-result/1"
    command: Literal["compare", "bench", "replay", "sweep", "demo", "simulate"]
    created: str
    """ISO 8601 with offset."""
    model: str
    seed: int
    configuration: dict[str, str | int | float | bool | list[str] | None]
    """The command's settings as given; secrets replaced."""
    workload: dict[str, str]
    """What the workload says of itself."""
    facts: dict[str, str] = Field(default_factory=dict)
    """Of the machine or the servers, for the report's last table."""
    isolation: str = ""
    """How arms were kept from finding each other's cache entries."""
    baseline: str = ""
    order: tuple[str, ...] = ()
    """Names of the arms in the order their blocks ran, such as A B B A."""
    arms: tuple[Arm, ...]
    contrasts: tuple[Contrast, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    verdict: tuple[str, ...] = ()
    """Sentences, the most important first."""
    cautions: tuple[str, ...] = ()
    definitions: dict[str, str]
