"""Decides which requests are traced: the six samplers of `OTEL_TRACES_SAMPLER`, expressed by two fields.

The SDK asks a sampler for every span that it begins. Here most requests get no span at all, so this module decides
without the SDK, by the same rule: it compares the low 64 bits of the trace id with the ratio
(https://opentelemetry.io/docs/specs/otel/trace/sdk/#traceidratiobased). So programs with the same ratio take the same
traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.common.otel.w3c import SAMPLED, Remote

LOW_64 = 2**64 - 1
NAMES = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """`ratio`: share of the traces taken, from 0 to 1. `follows_parent`: a caller's decision takes precedence."""

    ratio: float = 1.0
    follows_parent: bool = True

    def takes(self, trace_id: int, parent: Remote | None) -> bool:
        """Return whether a request is traced."""
        if parent is not None and self.follows_parent:
            return bool(parent.flags & SAMPLED)
        return trace_id & LOW_64 < round(self.ratio * 2**64)


def sampling_of(name: str, argument: str) -> Sampling:
    """Return the sampler of that name. Raises ValueError naming the variable at fault."""
    if name not in NAMES:
        raise ValueError(f"OTEL_TRACES_SAMPLER: {name!r} is not known; allowed: {', '.join(NAMES)}")
    base = name.removeprefix("parentbased_")
    ratio = {"always_on": 1.0, "always_off": 0.0}.get(base)
    if ratio is None:
        try:
            ratio = float(argument or "1")
        except ValueError:
            ratio = math.nan
        if not 0 <= ratio <= 1:
            raise ValueError(
                f"OTEL_TRACES_SAMPLER_ARG: {argument!r} is not a share of the traces: give a number from 0 to 1, "
                "such as 0.01"
            )
    return Sampling(ratio, base != name)
