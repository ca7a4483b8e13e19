"""What an analysis found: what JSON carries and the text is written from. Shares and rates are 0 to 1."""

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
    """Share of the hits to the token that rounding loses."""


class CacheRate(_Model):
    """Ideal hit rates for one size of cache."""

    cache_tokens: int | None
    """Of one pod; None: infinite."""
    one_pod: float
    random_routing: float
    """`pods` pods of that size, each request to a random one."""
    perfect_affinity: float
    """Their memory as one: an upper bound of what routing can do."""


class SharedPrefix(_Model):
    """A stretch of prompt that many requests have at the same place, behind the same prefix."""

    requests: int
    from_token: int
    to_token: int
    begins: str


class Finding(_Model):
    """Something that makes prompts differ before what they share."""

    kind: str
    """iso_time, uuid, date, clock, epoch, email, ip, identifier, number, counter, name, text, tools_order, key_order,
    parts_order."""
    where: str
    role: str
    message: int
    """Index of the message; -1: the tools or a plain prompt."""
    byte: int
    """Of the content, from 0; the most frequent place where it varies."""
    examples: tuple[str, str]
    cost_share: float
    """Share of the possible hits that is lost if this alone stays."""
    advice: str


class Gap(_Model):
    """Seconds between a request and the latest earlier one with the same prefix."""

    median_s: float
    p90_s: float


class Recommendation(_Model):
    """Whether to enable prefix caching, and why."""

    enable: bool
    routing: Literal["affinity", "indifferent", "none"]
    break_even_rate: float
    """Hit rate from which caching pays, with the costs given."""
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
    """Tokens an infinite cache holds at the end."""
    bytes_per_token: float | None
    """None: a trace of block ids, whose lengths are given."""
    span_s: float | None
    is_in_order: bool
    """Whether times never go back; without times True."""
    sharing_requests: float
    """Share of requests whose first block an earlier request had."""
    duplicate_requests: int
    """Requests whose whole prompt an earlier one had or began with."""
    hit_rate_exact: float | None
    """Infinite cache to the token; None: a trace of block ids."""
    block_loss: tuple[BlockLoss, ...]
    block_tokens: int
    """Block size of `caches`."""
    pods: int
    caches: tuple[CacheRate, ...]
    reuse_gap: Gap | None
    prefixes: tuple[SharedPrefix, ...]
    hit_rate: float
    """Infinite cache as the prompts are, in blocks of `findings_block_tokens`."""
    possible_hit_rate: float
    """The same with every finding mended."""
    findings_block_tokens: int
    findings: tuple[Finding, ...]
    recommendation: Recommendation
