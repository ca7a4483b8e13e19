"""The result of an analysis: the JSON document, and the source of the text. Shares and rates are 0 to 1."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BlockLoss(_Model):
    """What rounding down to whole blocks costs, with an infinite cache."""

    block_tokens: int
    hit_rate: float
    lost_hit_share: float
    """Share of the hits, counted to the token, that rounding loses."""


class CacheRate(_Model):
    """Ideal hit rates for one size of cache."""

    cache_tokens: int | None
    """Size of one pod's cache; None: infinite."""
    one_pod: float
    random_routing: float
    """Each request goes to a random one of `pods` pods of that size."""
    perfect_affinity: float
    """The pods share one memory: an upper bound for routing."""


class SharedPrefix(_Model):
    """A stretch of prompt that many requests have at the same place, after the same prefix."""

    requests: int
    from_token: int
    to_token: int
    begins: str


class Finding(_Model):
    """A difference between prompts that comes before text they share."""

    kind: str
    """iso_time, uuid, date, clock, epoch, email, ip, identifier, number, counter, name, text, tools_order, key_order,
    parts_order."""
    where: str
    role: str
    message: int
    """Index of the message; -1: the tools or a plain prompt."""
    byte: int
    """Offset in the content, from 0: the most frequent place of the difference."""
    examples: tuple[str, str]
    cost_share: float
    """Share of the possible hits that is lost if only this difference stays."""
    advice: str


class Gap(_Model):
    """Seconds between a request and the latest earlier request with the same prefix."""

    median_s: float
    p90_s: float


class Recommendation(_Model):
    """Whether to enable prefix caching, and why."""

    enable: bool
    routing: Literal["affinity", "indifferent", "none"]
    break_even_rate: float
    """Hit rate at which caching begins to pay off, at the given costs."""
    sentences: tuple[str, ...]


class Analysis(_Model):
    """Everything `analyze` says."""

    format: Literal["warmroute-analysis/1"] = "warmroute-analysis/1"
    file: str
    requests: int
    skipped_lines: int
    first_skipped: str
    is_truncated: bool
    """Whether reading stopped at a limit before the end of the file."""
    prompt_tokens: float
    distinct_tokens: float
    """Tokens that an infinite cache holds at the end."""
    bytes_per_token: float | None
    """None: a trace of block ids, which gives the lengths in tokens."""
    span_s: float | None
    is_in_order: bool
    """Whether times never go back; True without times."""
    sharing_requests: float
    """Share of requests whose first block an earlier request had."""
    duplicate_requests: int
    """Requests whose whole prompt is the beginning or the whole of an earlier prompt."""
    hit_rate_exact: float | None
    """Rate of an infinite cache, counted to the token; None: a trace of block ids."""
    block_loss: tuple[BlockLoss, ...]
    block_tokens: int
    """Block size of `caches`."""
    pods: int
    caches: tuple[CacheRate, ...]
    reuse_gap: Gap | None
    prefixes: tuple[SharedPrefix, ...]
    hit_rate: float
    """Rate of an infinite cache for the prompts as they are, in blocks of `findings_block_tokens`."""
    possible_hit_rate: float
    """The same rate with every finding repaired."""
    findings_block_tokens: int
    findings: tuple[Finding, ...]
    recommendation: Recommendation
