"""What answers have taught a gateway: tokens per byte, speeds of pods, sizes of their caches. Pure.

Gateways that share a registry keep these estimates in it, so that a gateway that has just started predicts as well as
one that has run for an hour. A gateway that loads them goes on learning from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from engine.contract.bounded_json import loads
from engine.contract.events import DecodeError
from router.views.speeds import LearntFactor, LearntSpeed
from router.views.types import PodId

T = TypeVar("T")
VERSION = 1
MAX_PODS = 4096
"""Pods of a model; beyond that, only the first are kept."""
MAX_BYTES = 2**20
_MAX_ENGINES = 16
_MAX_SIZES = 64
_LARGEST = 1e12
_MOST_LOG = 16.0
"""Bound of the logarithms of ratios and seconds: nothing takes less than a tenth of a microsecond, or more than a
hundred days. Beyond it, sums of squares lose what the fit of a speed needs."""
_MOST_NOISE = 100.0
"""Bound of the variance of a logarithm. No gateway counts an answer that is more than e^5 times off."""


@dataclass(frozen=True, slots=True)
class LearntTokens:
    """What is learnt about a model's text. Sums that decay: see `router.reading.model_ratios`."""

    prompt_bytes: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class LearntCapacity:
    """What is learnt about the cache of a pod that publishes nothing, in tokens."""

    capacity_tokens: float
    """The capacity as the pod's answers corrected it."""
    told_tokens: int | None
    """The capacity that the pod stated; None: it states none."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What is learnt about one model and its pods."""

    tokens: LearntTokens | None = None
    speeds: Mapping[str, LearntSpeed] = field(default_factory=dict)
    """Kind of engine -> its speed."""
    factors: Mapping[PodId, LearntFactor] = field(default_factory=dict)
    capacities: Mapping[PodId, LearntCapacity] = field(default_factory=dict)


def encode_learnt(learnt: Learnt, written_s: float) -> bytes:
    """Return the record as JSON. `written_s`: seconds since 1970, by Redis's clock."""
    tokens = learnt.tokens
    speeds = {
        kind: [s.level, s.noise, s.noises, s.observations, [[digits, *size] for digits, size in s.sizes.items()]]
        for kind, s in learnt.speeds.items()
    }
    return orjson.dumps(
        {
            "version": VERSION,
            "written_s": written_s,
            "tokens": None if tokens is None else [tokens.prompt_bytes, tokens.prompt_tokens, tokens.output_tokens],
            "speeds": speeds,
            "factors": {pod: [f.factor, f.evidence_s, f.mean] for pod, f in _first(learnt.factors)},
            "rooms": {pod: [cache.capacity_tokens, cache.told_tokens] for pod, cache in _first(learnt.capacities)},
        }
    )


def decode_learnt(data: bytes) -> tuple[Learnt, float]:
    """Return the record, and when it was written. Raises DecodeError on another version and on absurd numbers."""
    if len(data) > MAX_BYTES:
        raise DecodeError(f"a record of {len(data)} bytes, more than {MAX_BYTES}")
    try:
        record = loads(data)
        if record["version"] != VERSION:
            raise DecodeError(f"version {record['version']}, expected {VERSION}")
        if len(record["speeds"]) > _MAX_ENGINES or max(len(record["factors"]), len(record["rooms"])) > MAX_PODS:
            raise DecodeError("too many kinds of engines or pods")
        tokens = None
        if record["tokens"] is not None:
            size, count, output = record["tokens"]
            tokens = LearntTokens(_above(size), _above(count), _number(output))
        learnt = Learnt(
            tokens,
            {str(kind): _speed(*speed) for kind, speed in record["speeds"].items()},
            {
                PodId(pod): LearntFactor(_log(factor), _number(evidence_s), _log(mean))
                for pod, (factor, evidence_s, mean) in record["factors"].items()
            },
            {
                PodId(pod): LearntCapacity(_above(capacity), None if told is None else _count(told))
                for pod, (capacity, told) in record["rooms"].items()
            },
        )
        return learnt, _number(record["written_s"])
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DecodeError(f"not a valid record of what gateways have learnt: {error or type(error).__name__}") from None


def _speed(level: Any, noise: Any, noises: Any, observations: Any, sizes: Any) -> LearntSpeed:
    if len(sizes) > _MAX_SIZES:
        raise ValueError(f"{len(sizes)} sizes")
    return LearntSpeed(
        _log(level),
        _most(_above(noise), _MOST_NOISE),
        _above(noises),
        int(_number(observations)),
        {int(_number(digits)): (_above(n), _number(tokens), _log(seconds)) for digits, n, tokens, seconds in sizes},
    )


def _number(value: Any) -> float:
    if not 0 <= (number := float(value)) <= _LARGEST:
        raise ValueError(f"{number} where 0 to {_LARGEST:g} is expected")
    return number


def _above(value: Any) -> float:
    if (number := _number(value)) < 1e-9:
        raise ValueError(f"{number} where more than 0 is expected")
    return number


def _most(number: float, most: float) -> float:
    if number > most:
        raise ValueError(f"{number} where at most {most:g} is expected")
    return number


def _count(value: Any) -> int:
    if (number := int(_number(value))) < 1:
        raise ValueError(f"{number} where at least 1 is expected")
    return number


def _log(value: Any) -> float:
    if not math.isfinite(number := float(value)) or abs(number) > _MOST_LOG:
        raise ValueError(f"{number} as a logarithm")
    return number


def _first(by_pod: Mapping[PodId, T]) -> list[tuple[PodId, T]]:
    return list(by_pod.items())[:MAX_PODS]
