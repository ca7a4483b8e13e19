"""The result of a command: the content of the JSON file, and the source of every other output.

A report is drawn only from this, so `warmroute-loadgen report` can redraw an old result. Latencies are milliseconds
(`_ms`), all other times seconds (`_s`); rates are per second; shares are 0 to 1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT = "warmroute-result/1"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Interval(_Model):
    """An estimate and the ends of its confidence interval; the ends are None if there is nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None


class Distribution(_Model):
    """The distribution over completed requests. All fields are None if nothing was measured."""

    mean_ms: float | None = None
    median_ms: float | None = None
    std_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    percentiles_ms: dict[str, float] = Field(default_factory=dict)
    """Further percentiles that were requested: '99.9' -> value."""
    cdf_ms: tuple[float, ...] = ()
    """Quantiles 0, 1, .. 100 %; empty if not drawn."""
    with_failures_p99_ms: float | None = None
    """p99 if a failed request counts as infinitely slow; None: 1 % or more failed, so this percentile is infinite."""


class PodShare(_Model):
    """One pod's part of the load."""

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
    """Pod -> cached / prompt tokens of the requests whose first token came in the bucket; None: there were none."""
    request_rate: tuple[float, ...] = ()
    """Offered requests per second in each bucket, all pods."""


class Reuse(_Model):
    """How much was reused, and how much could have been reused."""

    cached_token_rate: float | None
    """Cached / prompt tokens according to usage; None: the server reported no usage."""
    counted_rate: float | None = None
    """The same according to the pods' counters; None: not scraped."""
    counters_agree: bool | None = None
    """Whether both rates agree within 1 point; None: there is nothing to compare."""
    attainable_rate: float | None = None
    """The rate of an infinite shared cache for the prompts in their order of sending, in bytes of whole strides."""
    achieved_share: float | None = None
    """Cached / attainable tokens, at most 1 unless `exceeds_attainable`."""
    exceeds_attainable: bool = False
    """More was cached than the run's own prompts can have left, so the caches were not empty when it began."""
    duplicate_prompts: int = 0
    """Requests whose whole prompt had been sent before in the run."""
    duplicated_prefill_tokens: int | None = None
    """Estimated tokens that were prefilled although some pod had computed them before."""


class Goodput(_Model):
    """Share and rate of offered requests that met every objective; failures and refusals do not meet them."""

    objectives_ms: dict[str, float]
    share: float
    request_goodput: float


class Validity(_Model):
    """Whether the run measured the server or the load generator."""

    valid: bool
    reasons: tuple[str, ...] = ()
    is_late: bool = False
    """Whether the generator's lag is one of the reasons."""
    lag_share: float | None = None
    """Largest share of a TTFT figure (mean, median, p90, p99) that may be the generator's lag; None: no TTFT."""
    lag_share_of: str = ""
    """The figure to which `lag_share` belongs."""
    lag_p99_share: float | None = None
    """p99 of the generator's lag / median TTFT."""


class Summary(_Model):
    """The numbers of one arm, or of one of its blocks."""

    planned: int
    completed: int
    failed: int
    not_sent: int
    failures: dict[str, int]
    failure_details: dict[str, str] = Field(default_factory=dict)
    """One example for each kind of failure, with the server's message."""
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
    """Counted from the intended send time."""
    ttft_from_send: Distribution
    """Counted from the actual send time, as in other tools."""
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    """Counted from the intended send time."""
    e2e_from_send: Distribution = Field(default_factory=Distribution)
    """Counted from the actual send time, as in other tools; all None: not measured."""
    lag: Distribution
    imbalance: float | None
    """Largest / mean over the pods of mean requests in flight; None: no answer named its pod."""
    request_imbalance: float | None
    """Largest / mean over the pods of the number of requests."""
    jain_index: float | None
    """(sum x)^2 / (n sum x^2) over the pods' mean requests in flight: 1 if balanced, 1/n if one pod has all."""
    pods: dict[str, PodShare]
    reuse: Reuse
    goodput: Goodput | None = None
    validity: Validity
    series: TimeSeries | None = None


class Contrast(_Model):
    """An arm compared with the baseline in one metric; ratio = arm / baseline, difference = arm - baseline."""

    metric: str
    """A metric of `experiment.compared`, such as ttft_mean_ms."""
    better: Literal["lower", "higher"]
    baseline: str
    arm: str
    pairs: int
    difference: Interval
    ratio: Interval
    judgement: Literal["better", "worse", "not distinguishable", "not judged"]


class Arm(_Model):
    """One policy, deployment or rate."""

    name: str
    url: str
    policy: str = ""
    summary: Summary
    blocks: tuple[Summary, ...] = ()
    """One summary per block, in order of time; series and cdfs are left out."""
    ttft_cdf_low_ms: tuple[float, ...] = ()
    """Lower end of the blocks' band around the TTFT's quantiles 0, 1, .. 100 %; empty with one block."""
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
    """The result of a command."""

    format: Literal["warmroute-result/1"] = "warmroute-result/1"
    command: Literal["compare", "bench", "replay", "sweep", "demo", "simulate"]
    created: str
    """ISO 8601 with offset."""
    model: str
    seed: int
    configuration: dict[str, str | int | float | bool | list[str] | None]
    """The command's settings as given, with secrets replaced."""
    workload: dict[str, str]
    """The workload's description of itself."""
    facts: dict[str, str] = Field(default_factory=dict)
    """Facts about the machine or the servers, for the report's last table."""
    isolation: str = ""
    """How arms were prevented from using each other's cache entries."""
    baseline: str = ""
    order: tuple[str, ...] = ()
    """Names of the arms in the order in which their blocks ran, such as A B B A."""
    arms: tuple[Arm, ...]
    contrasts: tuple[Contrast, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    partial: bool = False
    """Whether the user ended the measurement early; the figures are of what had been measured."""
    verdict: tuple[str, ...] = ()
    """Sentences, the most important first."""
    cautions: tuple[str, ...] = ()
    definitions: dict[str, str]
