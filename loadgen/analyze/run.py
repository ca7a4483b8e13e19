"""The analysis: three readings of the file, memory for keys alone.

1. keys of every prompt -> what is shared, caches of each size
2. prefixes to the byte -> what whole blocks lose; a sample of prompts -> suspicions of what breaks reuse
3. only with suspicions: keys of every prompt with and without them -> what each costs
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.analyze.advice import recommend
from loadgen.analyze.blocks import BYTES_PER_BLOCK_HELD, KeyLog, Sharing, fold, share
from loadgen.analyze.breaks import BreakFinder, Slot
from loadgen.analyze.cache import Simulation
from loadgen.analyze.exact import ExactMatcher
from loadgen.analyze.model import Analysis, BlockLoss, CacheRate, Finding, Gap, SharedPrefix
from loadgen.analyze.read import Prompt, Source, UnusableLog
from loadgen.analyze.repairs import Repair, Variant

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is (0 to 1)."""

_MANY_BLOCKS = 4_000_000
"""Above it, costs are measured in blocks four times as large: several key logs are held at once."""
_MIN_COST = 0.01
_MIN_GAIN = 0.005
_PREFIXES = 5
_EXAMPLE_BYTES = 60


@dataclass(frozen=True, slots=True)
class AnalysisSpec:
    """What to work out."""

    bytes_per_token: float = 4.0
    block_tokens: tuple[int, ...] = (16, 32, 64)
    """The first is the block size of the caches."""
    cache_tokens: tuple[int, ...] = ()
    """Of a pod; the recommendation is for the first."""
    pods: int = 1
    seed: int = 1
    write_cost: float = 1.01
    read_cost: float = 0.0
    memory_bytes: int = 1024 * 2**20
    trace_block_tokens: int | None = None
    """Tokens of a trace's block; None: worked out from its first lines."""

    @property
    def stride(self) -> int:
        """Bytes of a block."""
        return round(self.block_tokens[0] * self.bytes_per_token)


@dataclass(slots=True)
class _Reading:
    """What the first reading gives."""

    log: KeyLog
    times_s: array[float]
    is_trace: bool = False
    is_truncated: bool = False


@dataclass(frozen=True, slots=True)
class _Second:
    """What the second reading gives."""

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
    findings, costs = _costs(again, second.slots, sharing, spec, progress)
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
        hit_rate=costs.now,
        possible_hit_rate=costs.possible,
        findings_block_tokens=costs.block_tokens,
        findings=findings,
        recommendation=recommend(
            caches, findings, costs.possible, costs.now, spec.pods, (spec.write_cost, spec.read_cost)
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
    """The block size at which every line of the trace's beginning has as many ids as its length needs."""
    rows: list[Prompt] = [prompt for prompt, _ in replace(source, limit=200).prompts()]
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
    wanted = _top_runs(sharing)
    shared_bytes, begins = array("q"), {}
    for number, (prompt, done) in enumerate(source.prompts()):
        shared = matcher.match(number, prompt.text)
        shared_bytes.append(shared)
        finder.add(number, prompt, shared)
        for run in wanted.get(number, ()):
            at = int(sharing.run_first[run] - sharing.starts[number]) * spec.stride
            begins[run] = _readable(prompt.text[at : at + 2 * _EXAMPLE_BYTES])
        if number % 256 == 0:
            progress("comparing prompts", done)
    return _Second(shared_bytes, finder.slots(), _prefixes(sharing, begins))


def _top_runs(sharing: Sharing) -> dict[int, list[int]]:
    """The runs that save most, by the request that has them first."""
    uses = np.bincount(sharing.path_runs, minlength=len(sharing.run_blocks))
    saved = (uses - 1) * sharing.run_blocks
    out: dict[int, list[int]] = {}
    for run in np.argsort(-saved, kind="stable")[:_PREFIXES].tolist():
        if saved[run] > 0:
            request = int(np.searchsorted(sharing.starts, sharing.run_first[run], side="right")) - 1
            out.setdefault(request, []).append(run)
    return out


def _prefixes(sharing: Sharing, begins: dict[int, str]) -> tuple[SharedPrefix, ...]:
    uses = np.bincount(sharing.path_runs, minlength=len(sharing.run_blocks))
    found = []
    for run, text in begins.items():
        first = int(sharing.run_first[run])
        request = int(np.searchsorted(sharing.starts, first, side="right")) - 1
        at = (first - int(sharing.starts[request])) * sharing.block_tokens
        tokens = int(sharing.run_blocks[run]) * sharing.block_tokens
        found.append(SharedPrefix(requests=int(uses[run]), from_token=at, to_token=at + tokens, begins=text))
    return tuple(sorted(found, key=lambda p: -p.requests * (p.to_token - p.from_token)))


@dataclass(frozen=True, slots=True)
class _Costs:
    """What breaks cost, in blocks of `block_tokens`."""

    now: float
    possible: float
    shares: tuple[float, ...]
    """For each slot, the share of the possible hits that is lost where it alone stays."""
    block_tokens: int


def _costs(
    source: Source, slots: Sequence[Slot], sharing: Sharing, spec: AnalysisSpec, progress: Progress
) -> tuple[tuple[Finding, ...], _Costs]:
    rate = sharing.hit_rate()
    left = list(slots)
    while left:
        found = _measure(source, left, sharing, spec, progress)
        if found.possible - found.now < _MIN_GAIN:
            break
        if min(found.shares) >= _MIN_COST:
            findings = [_finding(slot, cost) for slot, cost in zip(left, found.shares, strict=True)]
            return tuple(sorted(findings, key=lambda finding: -finding.cost_share)), found
        # Of two suspicions of one break each seems to cost nothing while the other is mended: one goes, the rest are
        # measured again.
        _, _, least = min((cost, slot.weight, k) for k, (cost, slot) in enumerate(zip(found.shares, left, strict=True)))
        del left[least]
    return (), _Costs(rate, rate, (), sharing.block_tokens)


def _measure(source: Source, slots: Sequence[Slot], sharing: Sharing, spec: AnalysisSpec, progress: Progress) -> _Costs:
    repairs = [repair for slot in slots if (repair := slot.repaired_by())]
    block = spec.block_tokens[0] * (4 if len(sharing.first_seen) > _MANY_BLOCKS else 1)
    chosen: list[Sequence[Repair]] = [(), repairs]
    if len(repairs) > 1:
        chosen += [[repair for k, repair in enumerate(repairs) if k != left_out] for left_out in range(len(repairs))]
    variants = [Variant(some, block, spec.bytes_per_token) for some in chosen]
    for number, (prompt, done) in enumerate(source.prompts()):
        for variant in variants:
            variant.add(prompt)
        if number % 256 == 0:
            progress("measuring what breaks cost", done)
    now, possible, *without = [variant.hit_rate() for variant in variants]
    return _Costs(now, possible, tuple(1 - share(rate, possible) for rate in (without or [now])), block)


def _finding(slot: Slot, cost: float) -> Finding:
    where = slot.places.most_common(1)[0][0]
    kind = slot.kind
    what = kind.words[:1].upper() + kind.words[1:]
    a, b = (_readable(value[:_EXAMPLE_BYTES]) for value in slot.example)
    return Finding(
        kind=kind.name,
        where=str(where),
        role=where.role,
        message=where.message,
        byte=where.byte,
        examples=(a, b),
        cost_share=cost,
        advice=f"{what} at {where} costs {cost:.0%} of the possible hits: {kind.advice}.",
    )


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
    return int((sharing.hit_blocks == np.diff(sharing.starts)).sum())


def _reuse_gap(sharing: Sharing, times: array[float]) -> Gap | None:
    """Time since the last use of the last run that a request finds."""
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


def _readable(text: bytes) -> str:
    shown = text.replace(b"\x1f", b": ").replace(b"\x1e", b"\n").decode(errors="replace")
    return " ".join(shown.split())
