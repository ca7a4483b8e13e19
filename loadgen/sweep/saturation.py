"""Whether a server no longer keeps up with its load.

A point of a sweep is saturated if any of these holds (the first one that holds is given as the reason):

* less than 90 % of the offered requests were good (met --goodput; without it: completed)
* a sweep over rates: requests ended at less than 95 % of the rate at which they were due (`achieved_share`)
* a sweep over concurrency: compared with the best lower step, throughput grew by less than a tenth of the proportion
  by which the concurrency grew
* p99 of TTFT is more than `TTFT_GROWTH` times that of the lowest step: a queue builds up
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.measure.records import Records
from loadgen.result.model import Summary, SweepPoint

MIN_GOOD_SHARE = 0.9
MIN_ACHIEVED_SHARE = 0.95
MIN_GAIN_SHARE = 0.1
TTFT_GROWTH = 10.0
"""Long prompts among short ones alone make p99 a few times larger; only a queue that builds up makes it ten times."""
MOST_REQUESTS = 10_000_000
"""The most requests of a step that is asked for, as of --num-prompts: with more it would take hours to prepare."""
_LEAST_REQUESTS = 20
"""With fewer requests, medians of halves mean nothing."""


def check_rate(rate: float, point_s: float) -> None:
    """Raise ValueError if a step of `rate` requests/s, which lasts `point_s` seconds, has too many requests."""
    if rate * point_s > MOST_REQUESTS:
        raise ValueError(f"{rate:g} requests/s for --point-s {point_s:g} are over {MOST_REQUESTS:,} requests")


def reason(summary: Summary, records: Records, lower: Sequence[SweepPoint], point: float) -> str:
    """Return why the point is saturated; empty: it is not. `lower`: points of the same arm at lower steps, ascending;
    `point`: requests at a time in a sweep over concurrency, else 0."""
    good = good_share(summary)
    if good < MIN_GOOD_SHARE:
        return f"{good:.0%} of the offered requests were good"
    achieved = 1.0 if point else achieved_share(records)
    if achieved < MIN_ACHIEVED_SHARE:
        return f"requests ended at {achieved:.0%} of the rate at which they were due"
    if point and (best := max(lower, key=lambda p: p.summary.request_throughput, default=None)) and best.concurrency:
        gained = summary.request_throughput / max(best.summary.request_throughput, 1e-9) - 1
        if gained < MIN_GAIN_SHARE * (point / best.concurrency - 1):
            return f"{point:g} at a time brought {gained:+.0%} throughput over {best.concurrency}"
    first, now = (lower[0].summary if lower else None), summary.ttft.p99_ms
    if first and first.ttft.p99_ms and now and now > TTFT_GROWTH * first.ttft.p99_ms:
        return f"p99 of TTFT is {now / first.ttft.p99_ms:.0f} times that of the lowest step"
    return ""


def good_share(summary: Summary) -> float:
    """Return the share of offered requests that were good."""
    if summary.goodput:
        return summary.goodput.share
    return summary.completed / summary.planned if summary.planned else 0.0


def achieved_share(records: Records) -> float:
    """Return the rate at which requests ended / the rate at which they were due; 1 if too few requests can tell.

    If requests come faster than they are served, each waits longer than the one before. The middles of the run's two
    halves are `due_s` apart. Waiting grows by `growth_s` between them, so the requests due in `due_s` ended in
    `due_s + growth_s`. The function uses medians, so that neither the time of one request nor the run's tail counts.
    """
    if len(records) < _LEAST_REQUESTS:
        return 1.0
    order = np.argsort(records.intended_s, kind="stable")
    half = len(order) // 2
    first, second = order[:half], order[half:]
    latency_s = records.finished_s - records.intended_s
    due_s = float(np.median(records.intended_s[second]) - np.median(records.intended_s[first]))
    growth_s = float(np.median(latency_s[second]) - np.median(latency_s[first]))
    return due_s / (due_s + max(growth_s, 0.0)) if due_s > 0 else 1.0
