"""Compares other settings for the kernels with those in use, on this card: which are faster, for which sizes.

    python -m tests.bench.gpu.tune [--kernels decode,prefill,products] [--device cuda:0] [--limit-s 540] [--out FOLDER]

The settings in use are constants, because a result's bits must follow from the sizes, not from a race at the start.
This program tells what the constants should be. It runs every kernel of a Llama-3-8B step (bfloat16) at a few sizes
with each candidate. The ratio is the time of the settings in use / the candidate's time, so above 1 the candidate is
faster. The table in the folder is rewritten with every size. Exit status: 0, or 2 without a card.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.errors import TritonError

from engine.backend.cuda.kernels import decode, linear, prefill
from engine.backend.cuda.kernels.attend import Launch, PartSums
from engine.backend.cuda.kernels.step import DecodeTensors, PrefillTensors
from tests.bench.gpu.arithmetic import causal_pairs
from tests.bench.gpu.command import device_name, names_of, write
from tests.bench.gpu.parts.ceilings import timed_s
from tests.bench.gpu.parts.products import recorded
from tests.bench.gpu.report import table
from tests.engine.cuda.cutting import prefill_tensors

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that are measured."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 4096
    inner: int = 14_336
    page: int = 16
    layers: int = 8
    """Layers that take turns, so that no cache holds what a layer reads."""
    decodes: Sequence[tuple[int, int]] = ((1, 8192), (8, 1024), (64, 8192), (256, 1024))
    """Sequences, and tokens of each."""
    prefills: Sequence[tuple[int, int]] = ((8192, 0), (2048, 6144), (292, 7900), (100, 8092))
    """Tokens of a chunk, and tokens before it."""
    rows: Sequence[int] = (1, 16, 32, 64)
    """Rows of a product."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings by the names of the modules' constants; an empty one: the settings in use."""

    name: str
    module: Any = None
    values: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in self.values.items():
                stack.enter_context(mock.patch.object(self.module, name, value))
            yield


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate at one size."""

    kernel: str
    what: str
    """The size."""
    settings: str = "in use"
    seconds: float = math.inf
    """Infinite: the candidate does not fit the card."""
    ratio: float = 1.0
    """Time of the settings in use / this time."""
    work: float = 0.0
    """Bytes that must be read, or FLOPs if `unit` says so."""
    unit: str = "B"

    @property
    def rate(self) -> str:
        """Return work per second."""
        return f"{self.work / self.seconds / 1e12:.3g} T{self.unit}/s"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON, with null for infinity."""
        values = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def decode_candidates() -> list[Candidate]:
    """Return combinations of keys per tile, warps, pipeline depth and part length."""
    launches = ((64, 4, 3), (64, 4, 7), (64, 2, 5), (64, 8, 5), (32, 4, 7), (32, 2, 9), (128, 4, 3), (128, 8, 3))
    found = [_attention(decode, "PART_TOKENS", 16, *launch, part) for launch in launches for part in (256, 512)]
    return [*found, Candidate("PART_TOKENS 512", decode, {"PART_TOKENS": 512})]


def prefill_candidates() -> list[Candidate]:
    """Return combinations of rows and keys per tile, warps and pipeline depth."""
    launches = (
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 5),
        (128, 64, 4, 3),
        (128, 32, 8, 5),
        (64, 128, 4, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 5),
    )
    return [_attention(prefill, None, *launch) for launch in launches]


def product_candidates() -> list[Candidate]:
    """Return combinations of outputs and inputs per tile, pipeline depth and warps; and other numbers of prefetched
    lines."""
    launches = (
        (16, 128, 8, 4),
        (16, 256, 6, 4),
        (32, 64, 8, 4),
        (32, 128, 4, 4),
        (32, 128, 6, 8),
        (32, 256, 4, 4),
        (64, 64, 6, 4),
        (64, 128, 4, 4),
        (64, 128, 4, 8),
    )
    found = [
        Candidate(
            f"tile {tile}, depth {depth}, {stages} stages, {warps} warps",
            linear,
            _for_all(linear.ProductLaunch(tile=tile, depth=depth, stages=stages, warps=warps)),
        )
        for tile, depth, stages, warps in launches
    ]
    return [*found, *(Candidate(f"LINES_AHEAD {lines}", linear, {"LINES_AHEAD": lines}) for lines in (1, 4, 16))]


def _attention(
    module: Any, part: str | None, rows: int, tile: int, warps: int, stages: int, length: int = 0
) -> Candidate:
    values = _for_all(Launch(rows=rows, tile=tile, warps=warps, stages=stages)) | ({part: length} if part else {})
    name = f"{rows} x {tile}, {warps} warps, {stages} stages" + (f", parts of {length}" if part else "")
    return Candidate(name, module, values)


def _for_all(launch: object) -> dict[str, Any]:
    return {"launch_for": lambda *_, **__: launch, "INTERPRETED": launch}


KERNELS = {"decode": decode_candidates, "prefill": prefill_candidates, "products": product_candidates}
"""The kernels that can be tuned separately: the methods of `Tuner`, and the candidates of each."""


class Tuner:
    """Runs kernels with other settings, and keeps the results."""

    def __init__(self, shape: Shape, device: torch.device, *, keep: Callable[[], None], until_s: float) -> None:
        """`keep`: called after additions to `tried`; `until_s`: on the monotonic clock, no candidate begins later."""
        self.tried: list[Tried] = []
        self._shape = shape
        self._device = device
        self._keep = keep
        self._until_s = until_s

    def decode(self, candidates: Sequence[Candidate]) -> None:
        """Try attention of decode steps."""
        s = self._shape
        pool, blocks = self._pool(max(batch * tokens for batch, tokens in s.decodes))
        for batch, tokens in s.decodes:
            tables = blocks[: batch * tokens // s.page].view(batch, -1)
            rows = DecodeTensors(tables=tables, lengths=self._ints([tokens] * batch))
            q, out = self._queries(batch)

            # No candidate has shorter parts than the settings in use, so this scratch is large enough for all.
            scratch = decode.decode_scratch(batch, tokens, s.heads, s.dim, self._device)

            def work(q: Tensor = q, out: Tensor = out, rows: DecodeTensors = rows, scratch: PartSums = scratch) -> None:
                for layer in range(s.layers):
                    decode.paged_decode(q, pool, layer, out, rows, scratch, window=None, scale=s.dim**-0.5)

            size = batch * tokens * 2 * s.kv_heads * s.dim * pool.itemsize
            self._try(Tried("decode", f"decode of {batch} x {tokens}", work=size), work, candidates)

    def prefill(self, candidates: Sequence[Candidate]) -> None:
        """Try attention of chunks: long ones, and short ones after a prefix."""
        s = self._shape
        pool, blocks = self._pool(max(sum(chunk) for chunk in s.prefills))
        cut_for = prefill.tiling_for(s.heads, s.kv_heads, self._device)
        scratch = prefill.prefill_scratch(cut_for, s.dim, self._device)
        for tokens, context in s.prefills:
            tensors = prefill_tensors(cut_for, [(tokens, context)], blocks[None, : -(-(tokens + context) // s.page)])
            q, out = self._queries(tokens)

            def work(q: Tensor = q, out: Tensor = out, tensors: PrefillTensors = tensors) -> None:
                for layer in range(s.layers):
                    prefill.paged_prefill(q, pool, layer, out, tensors, scratch, window=None, scale=s.dim**-0.5)

            flops = 4 * s.heads * s.dim * causal_pairs(context, tokens)
            size = Tried("prefill", f"prefill of {tokens} behind {context}", work=flops, unit="FLOP")
            self._try(size, work, candidates)

    def products(self, candidates: Sequence[Candidate]) -> None:
        """Try products of few rows; gate, up and SiLU in one kernel."""
        s = self._shape
        qkv = (s.heads + 2 * s.kv_heads) * s.dim
        sizes = {"qkv": (s.hidden, qkv), "output": (s.heads * s.dim, s.hidden), "down": (s.inner, s.hidden)}
        for name, (inputs, columns) in (*sizes.items(), ("gate, up", (s.hidden, 2 * s.inner))):
            weights = [self._random(columns, inputs) for _ in range(s.layers)]
            for rows in s.rows:
                x, is_gated = self._random(rows, inputs), name == "gate, up"
                out = self._random(rows, columns // 2 if is_gated else columns)

                def work(x: Tensor = x, out: Tensor = out, gate: bool = is_gated, w: list[Tensor] = weights) -> None:
                    for weight in w:
                        if gate:
                            linear.gated_linear(x, weight, out)
                        else:
                            linear.linear(x, weight, None, out)

                kernel = "gated product" if is_gated else "product"
                self._try(Tried(kernel, f"{name}, {rows} rows", work=weights[0].nbytes), work, candidates)

    def _try(self, size: Tried, work: Callable[[], None], candidates: Sequence[Candidate]) -> None:
        """Try candidates; `work` does the work of `size` once for each layer."""
        layers = self._shape.layers
        in_use_s = self._measured(Candidate("in use"), work) / layers
        self._add(replace(size, seconds=in_use_s))
        for candidate in candidates:
            if time.monotonic() > self._until_s:
                print(f"  {size.what}: the time is over", file=sys.stderr, flush=True)
                break
            seconds = self._measured(candidate, work) / layers
            self._add(replace(size, settings=candidate.name, seconds=seconds, ratio=in_use_s / seconds))
        self._keep()

    def _add(self, tried: Tried) -> None:
        self.tried.append(tried)
        time_us = f"{tried.seconds * 1e6:.1f} us, {tried.rate}" if math.isfinite(tried.seconds) else "does not fit"
        print(f"  {tried.what}: {tried.settings}: {time_us}, {tried.ratio:.2f}", file=sys.stderr, flush=True)

    def _measured(self, candidate: Candidate, work: Callable[[], None]) -> float:
        """Return the seconds of `work`; infinite if it does not fit."""
        with candidate.in_use():
            try:
                work()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
            except (RuntimeError, TritonError) as error:  # of the driver or ptxas, or too much shared memory
                print(f"  {candidate.name}: {str(error)[:200]}", file=sys.stderr, flush=True)
                return math.inf
            return timed_s(self._device, recorded(self._device, work), _REPEATS)

    def _pool(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return a pool for `tokens` tokens, and its blocks in random order."""
        s = self._shape
        count = -(-tokens // s.page)
        blocks = torch.randperm(count, device=self._device).to(torch.int32)
        return self._random(count, s.layers, 2, s.page, s.kv_heads, s.dim), blocks

    def _queries(self, tokens: int) -> tuple[Tensor, Tensor]:
        s = self._shape
        return self._random(tokens, s.heads, s.dim), self._random(tokens, s.heads * s.dim)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def best(tried: Sequence[Tried]) -> list[tuple[str, str, float]]:
    """Return for each kernel the settings best for all its sizes, and the geometric mean of their ratios."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for one in tried:
        ratios.setdefault((one.kernel, one.settings), []).append(one.ratio)
    sizes = {kernel: len(ratios[kernel, "in use"]) for kernel, settings in ratios if settings == "in use"}
    means = [
        (kernel, settings, math.exp(sum(map(math.log, found)) / len(found)))
        for (kernel, settings), found in ratios.items()
        if len(found) == sizes[kernel] and all(found)
    ]
    return [max((mean for mean in means if mean[0] == kernel), key=lambda mean: mean[2]) for kernel in sizes]


def as_markdown(tried: Sequence[Tried]) -> str:
    """Return the best settings first, then all."""
    means = [(kernel, settings, f"{ratio:.3f}") for kernel, settings, ratio in best(tried)]
    rows = [
        (one.what, one.settings, f"{one.seconds * 1e6:.1f}", one.rate, f"{one.ratio:.3f}")
        for what in dict.fromkeys(one.what for one in tried)
        for one in sorted((one for one in tried if one.what == what), key=lambda one: one.seconds)
    ]
    lines = ["# Settings of the CUDA kernels", ""]
    lines += table(("kernel", "best for all its sizes", "time in use / best"), means)
    lines += ["", *table(("what", "settings", "us", "rate", "time in use / this"), rows)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=names_of(tuple(KERNELS)), default=tuple(KERNELS), help=",".join(KERNELS))
    parser.add_argument("--device", type=device_name, default="cuda:0", help="cuda or cuda:N")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which no candidate begins")
    parser.add_argument("--out", type=Path, default=Path("out/gpu-tune"), help="folder for report.json and report.md")
    arguments = parser.parse_args(argv)
    until_s = time.monotonic() + arguments.limit_s
    device = torch.device(arguments.device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        print(f"gpu-tune: torch sees no CUDA device {device}; there is nothing to measure", file=sys.stderr)
        return 2
    torch.cuda.set_device(device)
    arguments.out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        found = {"card": torch.cuda.get_device_name(device), "tried": [one.as_json() for one in tuner.tried]}
        write(arguments.out / "report.json", json.dumps(found, indent=2) + "\n")
        write(arguments.out / "report.md", as_markdown(tuner.tried))

    tuner = Tuner(Shape(), device, keep=keep, until_s=until_s)
    for kernel in arguments.kernels:
        getattr(tuner, kernel)(KERNELS[kernel]())
    print(as_markdown(tuner.tried))
    return 0


if __name__ == "__main__":
    sys.exit(main())
