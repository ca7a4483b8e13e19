"""Shows why hits were lost: classifies each request of a trace by which requests had been sent to which pod before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.vllm.servers import BLOCK_TOKENS

SLACK_BLOCKS = 2
"""A reuse that is shorter than the prefix by up to this many blocks is a hit, because prompts end within blocks."""


@dataclass(slots=True)
class Seen:
    """A client's record of one request. Times are seconds since the cell began."""

    number: int
    prefix: int
    gateway: int
    pod: str
    predicted: int
    """Prompt tokens that the gateway believed cached on the pod."""
    cached: int
    """Prompt tokens that the pod reused, by its answer's usage."""
    prompt_tokens: int
    sent_s: float
    first_s: float
    ended_s: float


class Cause(StrEnum):
    """Why a request reused less than it could have."""

    HIT = "hit"
    COLD = "the first request of its prefix"
    UNTOLD = "sent to a pod without the prefix, which only other gateways had sent before"
    MOVED = "sent to a pod without the prefix, though its own gateway had sent the prefix to the other pod"
    EVICTED = "evicted on the pod, though the gateway believed it cached"
    KNOWN_EVICTED = "evicted on the pod, as the gateway thought"
    PREFILLING = "sent behind the first request of its prefix, which was not computed yet"


def causes(trace: Iterable[Seen], prefix_tokens: int) -> Iterator[tuple[Seen, Cause, int]]:
    """Yield each request in the order of sending, its cause, and the tokens lost. `prefix_tokens`: tokens that the
    requests of a prefix share."""
    whole = prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    before: defaultdict[int, list[Seen]] = defaultdict(list)
    for seen in sorted(trace, key=lambda each: each.sent_s):
        history = before[seen.prefix]
        lost = max(0, whole - seen.cached)
        cause = _cause(seen, history, lost)
        yield seen, cause, 0 if cause in (Cause.HIT, Cause.COLD) else lost
        history.append(seen)


def _cause(seen: Seen, history: Sequence[Seen], lost: int) -> Cause:
    if not history:
        return Cause.COLD
    if lost <= SLACK_BLOCKS * BLOCK_TOKENS:
        return Cause.HIT
    there = [each for each in history if each.pod == seen.pod]
    if not there:
        own = any(each.gateway == seen.gateway for each in history)
        return Cause.MOVED if own else Cause.UNTOLD
    if all(each.first_s > seen.sent_s for each in there):
        return Cause.PREFILLING
    return Cause.EVICTED if seen.predicted > lost // 2 else Cause.KNOWN_EVICTED


def summary(trace: Sequence[Seen], prefix_tokens: int, attainable: int, since: int = 0) -> Iterator[str]:
    """Yield a line for each cause with losses, the greatest first. Requests before number `since` are only history."""
    requests: defaultdict[Cause, int] = defaultdict(int)
    tokens: defaultdict[Cause, int] = defaultdict(int)
    for seen, cause, lost in causes(trace, prefix_tokens):
        if seen.number >= since:
            requests[cause] += 1
            tokens[cause] += lost
    for cause in sorted(tokens, key=tokens.__getitem__, reverse=True):
        if tokens[cause]:
            yield f"{tokens[cause] / attainable:.1%} of the attainable reuse in {requests[cause]} requests: {cause}"
