"""The analysis: it reads the file up to three times and keeps only keys in memory.

1. The keys of every prompt show what is shared, and what caches of each size would hit.
2. Prefixes compared to the byte show what whole blocks lose. A sample of prompts gives suspicions of what breaks reuse.
3. If there are suspicions, the keys of every prompt with and without repairs show the cost of each.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np

from loadgen.analyze.advice import recommend
from loadgen.analyze.blocks import BYTES_PER_BLOCK_HELD, KeyLog, Sharing, fold, share
from loadgen.analyze.breaks import BreakFinder, Slot
from loadgen.analyze.cache import Simulation
from loadgen.analyze.costs import costs
from loadgen.analyze.exact import ExactMatcher
from loadgen.analyze.model import Analysis, BlockLoss, CacheRate, Gap, SharedPrefix
from loadgen.analyze.place import readable
from loadgen.analyze.prefixes import prefixes, top_runs
from loadgen.analyze.read import LoggedPrompt, Source, UnusableLog
from loadgen.analyze.spec import AnalysisSpec, Progress

_BEGINNING_BYTES = 120


@dataclass(slots=True)
class _Reading:
    """Result of the first reading."""

    log: KeyLog
    times_s: array[float]
    is_trace: bool = False
    is_truncated: bool = False


@dataclass(frozen=True, slots=True)
class _Second:
    """Result of the second reading."""

    shared_bytes: array[int]
    slots: list[Slot]
    prefixes: tuple[SharedPrefix, ...]


def analyze(source: Source, spec: AnalysisSpec, progress: Progress) -> Analysis:
    """Analyse a file. Raises UnusableLog."""
    reading = _read_keys(source, spec, progress)
    skipped, first_skipped = source.stats.skipped, source.stats.first_reason
    progress("sorting keys", 0.0)
    sharing = fold(reading.log)
    again = replace(source, limit=sharing.requests)
    caches = _caches(sharing, spec, progress)
    second = _Second(array("q"), [], ())
    if not reading.is_trace:
        second = _second_reading(again, sharing, spec, progress)
    findings, found = costs(again, second.slots, sharing, spec, progress)
    exact = np.array(second.shared_bytes, dtype=np.int64)
    total = float(sharing.tokens.sum())
    return Analysis(
        file=str(source.path),
        requests=sharing.requests,
        skipped_lines=skipped,
        first_skipped=first_skipped,
        is_truncated=reading.is_truncated,
        prompt_tokens=total,
        distinct_tokens=total - float(sharing.hit_tokens().sum()),
        bytes_per_token=None if reading.is_trace else spec.bytes_per_token,
        span_s=_span_s(reading.times_s),
        is_in_order=_is_in_order(reading.times_s),
        sharing_requests=float((sharing.hit_blocks > 0).mean()),
        duplicate_requests=_duplicates(sharing, exact, spec),
        hit_rate_exact=None if reading.is_trace else share(float((exact // spec.bytes_per_token).sum()), total),
        block_loss=_block_loss(sharing, exact, spec) if not reading.is_trace else (),
        block_tokens=sharing.block_tokens,
        pods=spec.pods,
        caches=caches,
        reuse_gap=_reuse_gap(sharing, reading.times_s),
        prefixes=second.prefixes,
        hit_rate=found.now,
        possible_hit_rate=found.possible,
        findings_block_tokens=found.block_tokens,
        findings=findings,
        recommendation=recommend(
            caches, findings, found.possible, found.now, spec.pods, (spec.write_cost, spec.read_cost)
        ),
    )


def _read_keys(source: Source, spec: AnalysisSpec, progress: Progress) -> _Reading:
    reading = _Reading(KeyLog(spec.block_tokens[0]), array("d"))
    most = spec.memory_bytes // BYTES_PER_BLOCK_HELD
    for number, (prompt, done) in enumerate(source.prompts()):
        if number == 0:
            reading.is_trace = prompt.tokens is not None
            if reading.is_trace:
                reading.log = KeyLog(spec.trace_block_tokens or _trace_block(source))
        if reading.is_trace != (prompt.tokens is not None):
            raise UnusableLog(f"{source.path} mixes prompts and lines with 'hash_ids'")
        if len(reading.log.keys) >= most:
            reading.is_truncated = True
            break
        if prompt.tokens is not None:
            reading.log.add_ids(prompt.block_ids, prompt.tokens)
        else:
            reading.log.add_text(prompt.text, spec.stride, len(prompt.text) / spec.bytes_per_token)
        reading.times_s.append(float("nan") if prompt.at_s is None else prompt.at_s)
        if number % 256 == 0:
            progress("reading prompts", done)
    return reading


def _trace_block(source: Source) -> int:
    """Return the block size at which each of the trace's first lines has as many ids as its length needs."""
    rows: list[LoggedPrompt] = [prompt for prompt, _ in replace(source, limit=200).prompts()]
    for size in (512, 256, 128, 64, 32, 16, 1024, 8):
        if all(-(-int(row.tokens or 0) // size) == len(row.block_ids) for row in rows):
            return size
    raise UnusableLog(
        f"{source.path}: 'input_length' and the number of 'hash_ids' fit no usual block size; give --trace-block-tokens"
    )


def _caches(sharing: Sharing, spec: AnalysisSpec, progress: Progress) -> tuple[CacheRate, ...]:
    simulation = Simulation(sharing, spec.pods, spec.seed)
    sizes: list[int | None] = [*spec.cache_tokens, None]
    rates = []
    for number, size in enumerate(sizes):
        progress("simulating caches", number / len(sizes))
        fleet = simulation.fleet(size)
        rates.append(
            CacheRate(
                cache_tokens=size,
                one_pod=fleet.one_pod,
                random_routing=fleet.random_routing,
                perfect_affinity=fleet.perfect_affinity,
            )
        )
    return tuple(rates)


def _second_reading(source: Source, sharing: Sharing, spec: AnalysisSpec, progress: Progress) -> _Second:
    matcher = ExactMatcher(sharing, spec.stride)
    finder = BreakFinder(sharing.requests)
    wanted = top_runs(sharing)
    shared_bytes, begins = array("q"), {}
    for number, (prompt, done) in enumerate(source.prompts()):
        shared = matcher.match(number, prompt.text)
        shared_bytes.append(shared)
        finder.add(number, prompt, shared)
        for run in wanted.get(number, ()):
            at = int(sharing.run_first[run] - sharing.starts[number]) * spec.stride
            begins[run] = readable(prompt.text[at : at + _BEGINNING_BYTES])
        if number % 256 == 0:
            progress("comparing prompts", done)
    return _Second(shared_bytes, finder.slots(), prefixes(sharing, begins))


def _block_loss(
    sharing: Sharing, exact: np.ndarray[tuple[int], np.dtype[np.int64]], spec: AnalysisSpec
) -> tuple[BlockLoss, ...]:
    total = float(sharing.tokens.sum())
    hits = float((exact // spec.bytes_per_token).sum())
    out = []
    for size in spec.block_tokens:
        whole = float((exact // round(size * spec.bytes_per_token)).sum()) * size
        out.append(BlockLoss(block_tokens=size, hit_rate=share(whole, total), lost_hit_share=share(hits - whole, hits)))
    return tuple(out)


def _duplicates(sharing: Sharing, exact: np.ndarray[tuple[int], np.dtype[np.int64]], spec: AnalysisSpec) -> int:
    if len(exact):
        return int((exact >= np.round(sharing.tokens * spec.bytes_per_token)).sum())
    blocks = np.diff(sharing.starts)
    return int(((sharing.hit_blocks == blocks) & (blocks > 0)).sum())


def _reuse_gap(sharing: Sharing, times: array[float]) -> Gap | None:
    """Return the time from the last use of a prefix to the request that finds it. The last use is that of the prefix's
    end."""
    last: dict[int, float] = {}
    gaps = []
    for path, at in zip(sharing.paths(), times, strict=True):
        if at != at:
            return None
        seen = [last[run] for run in path if run in last]
        if seen:
            gaps.append(max(at - seen[-1], 0.0))
        for run in path:
            last[run] = at
    if not gaps:
        return None
    return Gap(median_s=float(np.quantile(gaps, 0.5)), p90_s=float(np.quantile(gaps, 0.9)))


def _span_s(times: array[float]) -> float | None:
    known = np.array(times)
    known = known[~np.isnan(known)]
    return float(known.max() - known.min()) if len(known) > 1 else None


def _is_in_order(times: array[float]) -> bool:
    known = np.array(times)
    known = known[~np.isnan(known)]
    return bool((np.diff(known) >= 0).all())
