"""How many requests are on the pods at a time, computed from the times at which requests were sent and ended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def busy_seconds(starts_s: Floats, ends_s: Floats, at_s: Floats, rates: Floats | None = None) -> Floats:
    """Return the integral, up to each of `at_s`, of the number of requests in flight; with `rates`, of their rates'
    sum.

    A request in flight from s to e contributes min(t, e) - min(t, s); sorted prefix sums give all of them at once.
    """
    weights = np.ones(len(starts_s)) if rates is None else rates
    return _elapsed(starts_s, weights, at_s) - _elapsed(ends_s, weights, at_s)


def most_at_once(starts_s: Floats, ends_s: Floats) -> int:
    """Return the most requests in flight at one instant; one that ends as another starts does not overlap it."""
    if not len(starts_s):
        return 0
    times = np.concatenate((ends_s, starts_s))
    steps = np.repeat((-1, 1), (len(ends_s), len(starts_s)))
    # A stable sort puts ends before starts of the same instant, except for a request that took no time.
    return max(1, int(np.cumsum(steps[np.argsort(times, kind="stable")]).max()))


def peak_output_rate(first_s: Floats, ends_s: Floats, tokens: npt.NDArray[np.int64], origin_s: float) -> float:
    """Return the most output tokens in a whole second since `origin_s`; tokens after the first spread evenly to the
    end.

    vLLM's `max_output_tokens_per_s` (vllm/benchmarks/serve.py) counts each chunk in the second in which it came
    instead.
    """
    if not len(first_s):
        return 0.0
    edges: Floats = origin_s + np.arange(int(np.ceil(ends_s.max() - origin_s)) + 2, dtype=np.float64)
    firsts = np.histogram(first_s[tokens > 0], edges)[0]
    rest, took_s = np.maximum(tokens - 1, 0), ends_s - first_s
    spread = took_s > 0
    rates = rest[spread] / took_s[spread]
    during = np.diff(busy_seconds(first_s[spread], ends_s[spread], edges, rates))
    at_once = np.histogram(ends_s[~spread], edges, weights=rest[~spread])[0]
    return float((firsts + during + at_once).max())


def peak_per_second(starts_s: Floats, ends_s: Floats, origin_s: float) -> int:
    """Return the most requests in flight at any time of one second: vLLM's `max_concurrent_requests`."""
    if not len(starts_s):
        return 0
    first, last = (np.floor(times - origin_s).astype(np.int64) for times in (starts_s, ends_s))
    steps = np.zeros(last.max() + 2, np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last + 1, -1)
    return int(np.cumsum(steps).max())


def imbalance(loads: Floats) -> float | None:
    """Return largest / mean load: 1 if balanced, the number of pods if one pod has it all; None: there is no load."""
    total = loads.sum()
    return float(loads.max() * len(loads) / total) if total else None


def jain_index(loads: Floats) -> float | None:
    """Return (sum x)^2 / (n sum x^2): 1 if balanced, 1/n if one pod has all; None: no load (Jain, Chiu, Hawe, DEC
    TR-301)."""
    squares = float((loads**2).sum())
    return float(loads.sum() ** 2 / (len(loads) * squares)) if squares else None


def _elapsed(from_s: Floats, weights: Floats, at_s: Floats) -> Floats:
    """Return the sum of weight * max(0, t - from) at each t."""
    order = np.argsort(from_s)
    sorted_s, sorted_weights = from_s[order], weights[order]
    total = np.concatenate(([0.0], np.cumsum(sorted_weights)))
    moment = np.concatenate(([0.0], np.cumsum(sorted_weights * sorted_s)))
    upto = np.searchsorted(sorted_s, at_s)
    result: Floats = total[upto] * at_s - moment[upto]
    return result
