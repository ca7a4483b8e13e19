"""The measurements as JSON, as Markdown, and as checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.bench.gpu.checks import PREFILL_SHARE, PROMOTION_RATIO, THROUGHPUT_RATIO, WARM_TTFT_S, Check, decode_bound
from tests.bench.gpu.parts.ceilings import Ceilings
from tests.bench.gpu.parts.products import ProductFigure
from tests.bench.gpu.parts.profiling import StepProfile
from tests.bench.gpu.parts.serving import WarmFigure
from tests.bench.gpu.parts.steps import DecodeFigure, PrefillFigure
from tests.bench.gpu.parts.tier_run import PromotionFigure
from tests.bench.gpu.parts.transformers_run import TIE_BOUND, Agreement
from tests.bench.gpu.sizes import Sizes, expected

_KERNELS_SHOWN = 12
WORKLOADS = ("ShareGPT-like", "shared prefix")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload on the engine and on transformers' continuous batching."""

    workload: str
    requests: int
    input_tokens: int
    output_tokens: int
    ours_tokens_per_s: float
    ours_cached_tokens: int
    theirs_tokens_per_s: float
    """An upper bound if transformers left requests unanswered."""
    theirs_unanswered: int
    """Requests that transformers had not answered at the time limit."""
    theirs_attention: str
    agreement: Agreement

    @property
    def ratio(self) -> float:
        """Return output tokens per second, ours / theirs; a lower bound if theirs is an upper bound."""
        return self.ours_tokens_per_s / self.theirs_tokens_per_s

    @property
    def known_ratio(self) -> float | None:
        """Return the ratio; None: it is below the bound, but some answers are missing, so the true ratio may not be."""
        return None if self.theirs_unanswered and self.ratio < THROUGHPUT_RATIO else self.ratio


@dataclass(slots=True)
class Results:
    """The results, filled section by section."""

    machine: dict[str, str]
    ceilings: Ceilings | None = None
    products: list[ProductFigure] = field(default_factory=list)
    decode: list[DecodeFigure] = field(default_factory=list)
    prefill: list[PrefillFigure] = field(default_factory=list)
    warm: WarmFigure | None = None
    promotion: PromotionFigure | None = None
    profiles: list[StepProfile] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Section -> why it failed."""


def checks(results: Results, sizes: Sizes) -> list[Check]:
    """Return every bound, measured or not."""
    return list(_checks(results, expected(sizes)))


def _checks(results: Results, sizes: Sizes) -> Iterator[Check]:
    decode = {(figure.batch, figure.context): figure.share for figure in results.decode}
    for context in sizes.contexts:
        for batch in sizes.batches:
            what = f"decode, batch {batch}, context {context}: share of the roofline"
            yield Check(what, decode.get((batch, context)), decode_bound(batch), True)
    prefill = {figure.tokens: figure.share for figure in results.prefill}
    for tokens in sizes.prefills:
        what = f"prefill of {tokens}: share of the measured matmul rate"
        yield Check(what, prefill.get(tokens), PREFILL_SHARE, True)
    warm = results.warm
    size = sizes.engine.block_size
    reusable = sizes.warm_cached_tokens // size * size
    name = f"a prompt of {sizes.warm_prompt_tokens} with {sizes.warm_cached_tokens} cached"
    yield Check(f"tokens reused of {name}", warm.cached_tokens if warm else None, reusable, True)
    yield Check(f"TTFT of {name}", warm.warm_s if warm else None, WARM_TTFT_S, False, " s")
    what = f"promotion of {sizes.promoted_tokens} tokens, x bytes / measured PCIe rate"
    yield Check(what, results.promotion.ratio if results.promotion else None, PROMOTION_RATIO, False)
    by_name = {comparison.workload: comparison for comparison in results.comparisons}
    for workload in WORKLOADS:
        found = by_name.get(workload)
        what = f"{workload}: throughput, x transformers' continuous batching"
        yield Check(what, found.known_ratio if found else None, THROUGHPUT_RATIO, True)
        what = f"{workload}: widest gap where greedy answers differ, in standard deviations of the logits"
        compared = found is not None and found.agreement.requests > 0
        yield Check(what, found.agreement.widest_gap if found and compared else None, TIE_BOUND, False)


def as_json(results: Results, sizes: Sizes) -> dict[str, Any]:
    """Return the figures and the values derived from them."""
    return {
        "sizes": sizes.name,
        "machine": results.machine,
        "ceilings": results.ceilings and asdict(results.ceilings),
        "products": [asdict(f) | {"share": f.share, "ratio": f.ratio} for f in results.products],
        "decode": [asdict(f) | {"tokens_per_s": f.tokens_per_s, "share": f.share} for f in results.decode],
        "prefill": [asdict(f) | {"tokens_per_s": f.tokens_per_s, "share": f.share} for f in results.prefill],
        "warm": results.warm and asdict(results.warm),
        "promotion": results.promotion and asdict(results.promotion) | {"ratio": results.promotion.ratio},
        "profiles": [
            asdict(p) | {"busy_s": p.busy_s, "lost": p.lost, "by_kind": dict(p.by_kind())} for p in results.profiles
        ],
        "comparisons": [asdict(c) | {"ratio": c.ratio} for c in results.comparisons],
        "checks": [asdict(check) | {"verdict": check.verdict} for check in checks(results, sizes)],
        "failures": results.failures,
    }


def as_markdown(results: Results, sizes: Sizes) -> str:
    """Return tables for readers."""
    lines = [f"# GPU benchmark ({sizes.name})", ""]
    lines += [f"* {key}: {value}" for key, value in results.machine.items()]
    if (c := results.ceilings) is not None:
        lines += [
            f"* copy {c.copy_bytes_per_s / 1e12:.3f} TB/s, matmul {c.matmul_flops_per_s / 1e12:.1f} TFLOP/s, "
            f"to the device {c.up_bytes_per_s / 1e9:.1f} GB/s, from it {c.down_bytes_per_s / 1e9:.1f} GB/s"
        ]
    lines += _products(results)
    lines += _decode(results)
    lines += _prefill(results)
    if (w := results.warm) is not None:
        cells = (w.prompt_tokens, w.cached_tokens, _ms(w.warm_s), _ms(w.cold_s))
        lines += _section("Time to first token", ("prompt", "cached", "warm ms", "cold ms"), [cells])
    lines += _promotion(results)
    lines += _against_transformers(results)
    for profile in results.profiles:
        lines += _profile(profile)
    lines += ["", "## Bounds", "", *(f"* {check}" for check in checks(results, sizes))]
    lines += [f"* failed: {section}: {reason}" for section, reason in results.failures.items()]
    return "\n".join(lines) + "\n"


def _products(results: Results) -> list[str]:
    return _section(
        "Products of few rows",
        ("matrix", "rows", "us", "of copy bandwidth", "torch us", "torch's time / ours"),
        [
            (f.what, f.rows, f"{f.ours_s * 1e6:.1f}", f"{f.share:.0%}", f"{f.torch_s * 1e6:.1f}", f"{f.ratio:.2f}")
            for f in results.products
        ],
    )


def _decode(results: Results) -> list[str]:
    lines = _section(
        "Decode",
        ("batch", "context", "step ms", "tokens/s", "roofline ms", "share"),
        [
            (
                f.batch,
                f"{f.context}{' *' if f.shared_blocks else ''}",
                _ms(f.step_s),
                f"{f.tokens_per_s:,.0f}",
                _ms(f.roofline_s),
                f"{f.share:.0%}",
            )
            for f in results.decode
        ],
    )
    if any(figure.shared_blocks for figure in results.decode):
        lines += [
            "",
            "\\* more KV than the pool holds: sequences share blocks; a block is read again after the whole pool.",
        ]
    return lines


def _prefill(results: Results) -> list[str]:
    return _section(
        "Prefill",
        ("tokens", "ms", "tokens/s", "TFLOP/s", "of matmul rate"),
        [
            (
                f.tokens,
                _ms(f.elapsed_s),
                f"{f.tokens_per_s:,.0f}",
                f"{f.flops / f.elapsed_s / 1e12:.4g}",
                f"{f.share:.0%}",
            )
            for f in results.prefill
        ],
    )


def _promotion(results: Results) -> list[str]:
    if (p := results.promotion) is None:
        return []
    header = ("tokens", "MB", "ms", "link ms", "ratio", "ms beside decode", "decode step ms", "step beside ms")
    row = (
        p.tokens,
        f"{p.bytes / 1e6:.1f}",
        _ms(p.elapsed_s),
        _ms(p.link_s),
        f"{p.ratio:.2f}",
        _ms(p.beside_decode_s),
        _ms(p.decode_step_s),
        _ms(p.decode_step_beside_s),
    )
    return _section("Promotion from the host tier", header, [row])


def _against_transformers(results: Results) -> list[str]:
    return _section(
        "Against transformers' continuous batching",
        (
            "workload",
            "requests",
            "input",
            "output",
            "ours tok/s",
            "theirs tok/s",
            "ratio",
            "equal answers",
            "equal tokens",
            "widest gap",
        ),
        [
            (
                f"{c.workload} ({c.theirs_attention})",
                c.requests,
                c.input_tokens,
                c.output_tokens,
                f"{c.ours_tokens_per_s:,.0f}",
                f"{'< ' * bool(c.theirs_unanswered)}{c.theirs_tokens_per_s:,.0f}",
                f"{'> ' * bool(c.theirs_unanswered)}{c.ratio:.2f}",
                f"{c.agreement.equal}/{c.agreement.requests}",
                f"{c.agreement.equal_tokens}/{c.agreement.tokens}",
                f"{c.agreement.widest_gap:.3f}",
            )
            for c in results.comparisons
        ],
    )


def _profile(profile: StepProfile) -> list[str]:
    busy_s = profile.busy_s or 1.0
    kinds = [(kind, _ms(seconds), f"{seconds / busy_s:.0%}") for kind, seconds in profile.by_kind()]
    kernels = [(k.name[:70], f"{k.calls:g}", _ms(k.seconds), f"{k.seconds / busy_s:.0%}") for k in profile.kernels]
    title = f"{profile.what}: {profile.wall_s * 1e3:.2f} ms a step, {profile.busy_s * 1e3:.2f} of them in kernels"
    lines = _section(title, ("part", "ms", "share"), kinds)
    if profile.lost:
        lines += [
            "",
            f"The profiler has lost {profile.lost:.2g} launches of a step or more: its figures are too low.",
        ]
    return [*lines, "", *table(("kernel", "calls", "ms", "share"), kernels[:_KERNELS_SHOWN])]


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return ["", f"## {title}", "", *table(header, rows)] if rows else []


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    body = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (header, ["---"] * len(header), *rows)]
    return [f"| {line} |" for line in body]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
