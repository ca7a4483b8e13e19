"""The numbers of a run, or of all runs of an arm. `definitions.py` explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loadgen.measure.columns import Columns, Floats, Run, columns_of
from loadgen.measure.distributions import CDF_POINTS, distribution, percentile_name
from loadgen.measure.gaps import GapHistogram
from loadgen.measure.goodput import goodput
from loadgen.measure.occupancy import (
    imbalance,
    jain_index,
    most_at_once,
    peak_output_rate,
    peak_per_second,
)
from loadgen.measure.pods import Counted, PodCount
from loadgen.measure.reuse import Attainable, attainable, duplicate_prompts
from loadgen.measure.series import time_series
from loadgen.measure.validity import validity
from loadgen.result.model import Distribution, PodShare, Reuse, Summary

AGREEMENT = 0.01
"""Hit rates from usage and from the pods' counters agree if they differ by no more than this."""


def summarise(
    run: Run,
    pods: Sequence[str] = (),
    objectives_ms: Mapping[str, float] | None = None,
    counted: Counted | None = None,
    *,
    percentiles: Sequence[float] = (),
    in_brief: bool = False,
) -> Summary:
    """Return the numbers of one run. `pods` are all pods of the experiment, even if this run did not use them all;
    `in_brief` leaves out the data that only plots need."""
    return summarise_runs([run], pods, objectives_ms, [counted], percentiles=percentiles, in_brief=in_brief)


def summarise_runs(
    runs: Sequence[Run],
    pods: Sequence[str] = (),
    objectives_ms: Mapping[str, float] | None = None,
    counted: Sequence[Counted | None] = (),
    *,
    percentiles: Sequence[float] = (),
    in_brief: bool = False,
    is_compared: bool = False,
) -> Summary:
    """Return the numbers of pooled runs, as if each began when the one before ended. `counted` has an entry for each
    run. For `is_compared`, see `validity`."""
    columns = columns_of(runs, pods)
    done = columns.completed
    failed = int(len(columns) - done.sum())
    first_s, last_s = columns.first_token_s[done], columns.last_token_s[done]
    prompt_tokens, output_tokens = int(columns.prompt_tokens[done].sum()), int(columns.output_tokens[done].sum())
    cdf = not in_brief
    ttft = distribution(_known(columns.ttft_s[done]), failed=failed, percentiles=percentiles, cdf=cdf)
    lag = distribution(columns.lag_s, percentiles=percentiles)
    counts = _added(counted)
    shares = _pod_shares(columns, counts)
    loads = np.array([shares[pod].mean_in_flight for pod in columns.pods])
    return Summary(
        planned=columns.offered,
        completed=int(done.sum()),
        failed=failed,
        not_sent=columns.offered - len(columns),
        failures=columns.failures,
        failure_details=columns.failure_details,
        duration_s=columns.duration_s,
        request_throughput=_ratio(int(done.sum()), columns.duration_s),
        output_throughput=_ratio(output_tokens, columns.duration_s),
        total_token_throughput=_ratio(prompt_tokens + output_tokens, columns.duration_s),
        max_concurrent_requests=peak_per_second(columns.sent_s, columns.finished_s, 0.0),
        max_output_tokens_per_s=peak_output_rate(first_s, last_s, columns.output_tokens[done], 0.0),
        prompt_tokens=prompt_tokens,
        cached_tokens=int(columns.cached_tokens[done].sum()),
        output_tokens=output_tokens,
        ttft=ttft,
        ttft_from_send=distribution(
            _known(first_s - columns.sent_s[done]), failed=failed, percentiles=percentiles, cdf=cdf
        ),
        tpot=distribution(_known(columns.tpot_s[done]), failed=failed, percentiles=percentiles),
        itl=_of_gaps(columns.gaps, percentiles),
        e2e=distribution(columns.e2e_s[done], failed=failed, percentiles=percentiles, cdf=cdf),
        e2e_from_send=distribution(
            columns.finished_s[done] - columns.sent_s[done], failed=failed, percentiles=percentiles
        ),
        lag=lag,
        imbalance=imbalance(loads),
        request_imbalance=imbalance(np.array([shares[pod].requests for pod in columns.pods], float)),
        jain_index=jain_index(loads),
        pods=shares,
        reuse=_reuse(columns, runs, counts if counted and all(counted) else {}),
        goodput=goodput(columns, objectives_ms) if objectives_ms else None,
        validity=validity(columns, is_compared=is_compared),
        series=None if in_brief else time_series(columns),
    )


def _pod_shares(columns: Columns, counts: Mapping[str, PodCount]) -> dict[str, PodShare]:
    """Return each pod's part, over completed and failed requests; pods that only counters name come last."""
    pods, owned = len(columns.pods), columns.pod >= 0

    def total(values: Floats) -> list[float]:
        return [float(sum_) for sum_ in np.bincount(columns.pod[owned], weights=values[owned], minlength=pods)]

    requests, prompt = total(np.ones(len(columns))), total(columns.prompt_tokens.astype(float))
    cached, output = total(columns.cached_tokens.astype(float)), total(columns.output_tokens.astype(float))
    busy_s = total(columns.finished_s - columns.sent_s)
    shares = {}
    for i, pod in enumerate(columns.pods):
        mine, count = columns.pod == i, counts.get(pod)
        shares[pod] = PodShare(
            requests=int(requests[i]),
            prompt_tokens=int(prompt[i]),
            cached_tokens=int(cached[i]),
            output_tokens=int(output[i]),
            mean_in_flight=_ratio(busy_s[i], columns.duration_s),
            max_in_flight=most_at_once(columns.sent_s[mine], columns.finished_s[mine]),
            counted_prompt_tokens=count.prompt_tokens if count else None,
            counted_cached_tokens=count.cached_tokens if count else None,
        )
    for pod, count in counts.items():
        if pod not in shares:
            shares[pod] = PodShare(counted_prompt_tokens=count.prompt_tokens, counted_cached_tokens=count.cached_tokens)
    return shares


def _reuse(columns: Columns, runs: Sequence[Run], counts: Mapping[str, PodCount]) -> Reuse:
    known = columns.completed & columns.has_usage
    prompt, cached = int(columns.prompt_tokens[known].sum()), int(columns.cached_tokens[known].sum())
    rate = cached / prompt if prompt else None
    queries = sum(count.prompt_tokens for count in counts.values())
    counted = sum(count.cached_tokens for count in counts.values()) / queries if queries else None
    could = sum((attainable(run.records) for run in runs), Attainable())
    return Reuse(
        cached_token_rate=rate,
        counted_rate=counted,
        counters_agree=None if rate is None or counted is None else abs(rate - counted) <= AGREEMENT,
        attainable_rate=could.rate,
        achieved_share=could.achieved_share,
        exceeds_attainable=could.is_exceeded,
        duplicate_prompts=sum(duplicate_prompts(run.records.prompt_hash) for run in runs),
        duplicated_prefill_tokens=round(could.duplicated_tokens) if could.requests else None,
    )


def _added(counted: Sequence[Counted | None]) -> dict[str, PodCount]:
    """Return the counts of all runs together; empty unless every run has counts."""
    if not all(counted):
        return {}
    total: dict[str, PodCount] = {}
    for part in counted:
        for pod, count in (part.pods if part else {}).items():
            before = total.get(pod, PodCount(0, 0))
            total[pod] = PodCount(
                before.prompt_tokens + count.prompt_tokens, before.cached_tokens + count.cached_tokens
            )
    return total


def _of_gaps(gaps: GapHistogram, percentiles: Sequence[float]) -> Distribution:
    if not gaps.count:
        return Distribution()
    return Distribution(
        mean_ms=gaps.mean * 1000,
        median_ms=gaps.quantile(0.5) * 1000,
        std_ms=gaps.std * 1000,
        p90_ms=gaps.quantile(0.9) * 1000,
        p95_ms=gaps.quantile(0.95) * 1000,
        p99_ms=gaps.quantile(0.99) * 1000,
        percentiles_ms={percentile_name(p): gaps.quantile(p / 100) * 1000 for p in percentiles},
        cdf_ms=tuple(gaps.quantile(float(point)) * 1000 for point in CDF_POINTS),
    )


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
