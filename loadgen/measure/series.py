"""Load and reuse of each pod over time, in buckets."""

from __future__ import annotations

import math

import numpy as np

from loadgen.measure.columns import Columns, Floats
from loadgen.measure.occupancy import busy_seconds
from loadgen.result.model import TimeSeries

MAX_BUCKETS = 120


def bucket_seconds(duration_s: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten, at least 0.1 s, that makes at most MAX_BUCKETS buckets."""
    least_s = max(duration_s / MAX_BUCKETS, 0.1)
    power = 10.0 ** math.floor(math.log10(least_s) + 1e-9)
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least_s * (1 - 1e-9))


def time_series(columns: Columns) -> TimeSeries | None:
    """Return the series; None if nothing was sent."""
    if not len(columns) or columns.duration_s <= 0:
        return None
    bucket_s = bucket_seconds(columns.duration_s)
    buckets = math.ceil(columns.duration_s / bucket_s - 1e-9)
    edges: Floats = np.arange(buckets + 1, dtype=np.float64) * bucket_s
    edges[-1] = columns.duration_s
    widths = np.diff(edges)
    in_flight, rates = {}, {}
    answered = columns.completed & columns.has_usage
    when = np.clip(np.nan_to_num(columns.first_token_s / bucket_s).astype(np.int64), 0, buckets - 1)
    for i, pod in enumerate(columns.pods):
        mine = columns.pod == i
        busy_s = np.diff(busy_seconds(columns.sent_s[mine], columns.finished_s[mine], edges))
        in_flight[pod] = tuple(np.maximum(busy_s / widths, 0).tolist())
        chosen = mine & answered
        prompt = np.bincount(when[chosen], weights=columns.prompt_tokens[chosen], minlength=buckets)
        cached = np.bincount(when[chosen], weights=columns.cached_tokens[chosen], minlength=buckets)
        rates[pod] = tuple(float(c / p) if p else None for c, p in zip(cached, prompt, strict=True))
    intended = np.histogram(columns.intended_s, edges)[0]
    return TimeSeries(
        bucket_s=bucket_s,
        in_flight=in_flight,
        cached_token_rate=rates,
        request_rate=tuple((intended / widths).tolist()),
    )
