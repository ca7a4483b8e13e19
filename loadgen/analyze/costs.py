"""The cost of each suspicion, measured on every prompt: with all suspicions repaired, and with all except one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.analyze.blocks import Sharing, share
from loadgen.analyze.breaks import Slot
from loadgen.analyze.model import Finding
from loadgen.analyze.place import readable
from loadgen.analyze.read import Source
from loadgen.analyze.repairs import Repair, Variant
from loadgen.analyze.spec import AnalysisSpec, Progress

_MANY_BLOCKS = 4_000_000
"""Above this number of blocks, costs are measured in blocks four times as large: several key logs must fit into
memory."""
_MIN_COST = 0.01
_MIN_GAIN = 0.005
_EXAMPLE_BYTES = 60


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of breaks, in blocks of `block_tokens`."""

    now: float
    possible: float
    shares: tuple[float, ...]
    """For each slot, the share of the possible hits that is lost if only this break stays."""
    block_tokens: int


def costs(
    source: Source, slots: Sequence[Slot], sharing: Sharing, spec: AnalysisSpec, progress: Progress
) -> tuple[tuple[Finding, ...], Costs]:
    """Return the findings, most expensive first, and the rates behind them. `slots`: suspicions in prompt order."""
    rate = sharing.hit_rate()
    left = list(slots)
    while left:
        found = _measure(source, left, sharing, spec, progress)
        if found.possible - found.now < _MIN_GAIN:
            break
        if min(found.shares) >= _MIN_COST:
            findings = [_finding(slot, cost) for slot, cost in zip(left, found.shares, strict=True)]
            return tuple(sorted(findings, key=lambda finding: -finding.cost_share)), found
        # Two suspicions of the same break each seem to cost nothing while the other is repaired. So one is dropped, and
        # the rest are measured again.
        _, _, least = min((cost, slot.weight, k) for k, (cost, slot) in enumerate(zip(found.shares, left, strict=True)))
        del left[least]
    return (), Costs(rate, rate, (), sharing.block_tokens)


def _measure(source: Source, slots: Sequence[Slot], sharing: Sharing, spec: AnalysisSpec, progress: Progress) -> Costs:
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
    return Costs(now, possible, tuple(1 - share(rate, possible) for rate in (without or [now])), block)


def _finding(slot: Slot, cost: float) -> Finding:
    where = slot.places.most_common(1)[0][0]
    kind = slot.kind
    what = kind.words[:1].upper() + kind.words[1:]
    a, b = (readable(value[:_EXAMPLE_BYTES]) for value in slot.example)
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
