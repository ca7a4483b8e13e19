"""The measurements in their order; each fills its part of the results."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec

import torch

from engine.backend.cuda.backend import CudaBackend
from tests.bench.gpu.models import Model
from tests.bench.gpu.parts.ceilings import Ceilings, measure_ceilings
from tests.bench.gpu.parts.engine_run import Engine, start_backend
from tests.bench.gpu.parts.products import measure_products
from tests.bench.gpu.parts.profiling import profile_steps
from tests.bench.gpu.parts.serving import ServedWorkload, measure_warm_ttft, serve
from tests.bench.gpu.parts.steps import Steps
from tests.bench.gpu.parts.tier_run import measure_promotion
from tests.bench.gpu.parts.transformers_run import Transformers
from tests.bench.gpu.report import Comparison, Results
from tests.bench.gpu.sizes import Sizes
from tests.bench.gpu.workloads import Workload, shared_prefix, sharegpt_like

_DEADLINE_S = 900.0
"""Limit for transformers' answers to a workload, if the run has no limit of its own."""
_COMPARE_S = 45.0
"""Time per workload for preparing transformers and for checking where its answers differ from ours."""

Section = Callable[[], Awaitable[None]]


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One engine on one device; `measure` runs the requested sections."""

    def __init__(
        self, model: Model, sizes: Sizes, results: Results, *, keep: Callable[[], None], limit_s: float
    ) -> None:
        """`keep`: called after each change of `results`, because the run may be killed at any time. `limit_s`: seconds
        from now; no section begins later, and the comparison gives up work that would take longer."""
        self._model = model
        self._sizes = sizes
        self._results = results
        self._keep = keep
        self._until_s = time.monotonic() + limit_s

    async def measure(self, wanted: frozenset[str]) -> None:
        """Run all of `wanted`, the comparison last, because the two engines do not fit on the device together."""
        await self._run({"start": lambda: self._measure(wanted)})

    async def _run(self, sections: Mapping[str, Section]) -> None:
        await run_sections(sections, self._results, self._keep, self._until_s)

    async def _measure(self, wanted: frozenset[str]) -> None:
        sizes, model = self._sizes, self._model
        say("ceilings")
        ceilings = measure_ceilings(
            model.device, model.dtype, copy_bytes=sizes.copy_bytes, matmul_size=sizes.matmul_size
        )
        self._results.ceilings = ceilings
        self._keep()
        if "products" in wanted:  # before the engine, which takes most of the memory
            await self._run({"products": lambda: self._products(ceilings)})
        # The profile follows everything that is timed: the profiler stays attached to the driver, which slows later
        # work (pytorch issue 144455).
        last = wanted & {"profile"} if "transformers" in wanted else frozenset()
        served = await self._with_engine(wanted - last, ceilings)
        if served:
            await self._run({"transformers": lambda: self._compare(served)})
        if last:
            await self._with_engine(last, ceilings)

    async def _with_engine(self, wanted: frozenset[str], ceilings: Ceilings) -> list[ServedWorkload]:
        """Start an engine and measure it; return its answers to the workloads that are compared."""
        sizes, model = self._sizes, self._model
        _give_back(model.device)
        say(f"engine: {sizes.name} model, {model.dtype}, {model.device}")
        start_s = time.monotonic()
        backend, blocks = start_backend(model, sizes.engine)
        say(f"  started in {time.monotonic() - start_s:.0f} s, {blocks} blocks of {sizes.engine.block_size} tokens")
        served: list[ServedWorkload] = []
        sections = self._sections(backend, blocks, ceilings, served)
        await self._run({name: work for name, work in sections.items() if name in wanted})
        await backend.close()
        del sections, backend
        _give_back(model.device)
        return served

    def _sections(
        self, backend: CudaBackend, blocks: int, ceilings: Ceilings, served: list[ServedWorkload]
    ) -> Mapping[str, Section]:
        sizes, results, steps = self._sizes, self._results, Steps(backend, range(blocks))

        async def decode() -> None:
            for context in sizes.contexts:
                for batch in sizes.batches:
                    figure = await steps.decode(batch, context, sizes.decode_steps, sizes.rounds, ceilings)
                    results.decode.append(figure)
                    self._keep()
                    say(f"  batch {batch}, context {context}: {figure.step_s * 1e3:.2f} ms, {figure.share:.0%}")

        async def prefill() -> None:
            for tokens in sizes.prefills:
                figure = await steps.prefill(tokens, sizes.engine.max_step_tokens, sizes.rounds, ceilings)
                results.prefill.append(figure)
                self._keep()
                say(f"  {tokens} tokens: {figure.elapsed_s * 1e3:.1f} ms, {figure.share:.0%}")

        async def ttft() -> None:
            async with Engine(backend, blocks, sizes.engine).running() as engine:
                results.warm = await measure_warm_ttft(
                    engine, sizes.warm_prompt_tokens, sizes.warm_cached_tokens, sizes.rounds + 2
                )

        async def promotion() -> None:
            results.promotion = await measure_promotion(
                backend, sizes.promoted_tokens, sizes.beside, sizes.rounds, ceilings
            )

        async def profile() -> None:
            for batch, context in sizes.profiled:
                tables, _ = steps.tables(batch, context, sizes.profiled_steps + 1)
                plans = steps.decode_plans(tables, context, sizes.profiled_steps + 1)
                results.profiles.append(profile_steps(backend, f"decode, batch {batch}, context {context}", plans))
                self._keep()
            prompt, cached = sizes.warm_prompt_tokens, sizes.warm_cached_tokens
            for what, tokens, start in (
                (f"prefill of {sizes.profiled_prefill} tokens", sizes.profiled_prefill, 0),
                (f"prefill of {prompt - cached} tokens behind {cached}", prompt, cached),
            ):
                (one,) = steps.prefill_plans(tokens, tokens, start)
                results.profiles.append(profile_steps(backend, what, [one] * (sizes.profiled_steps + 1)))

        return {
            "decode": decode,
            "prefill": prefill,
            "ttft": ttft,
            "promotion": promotion,
            "profile": profile,
            "transformers": partial(self._transformers, backend, blocks, served),
        }

    async def _transformers(self, backend: CudaBackend, blocks: int, served: list[ServedWorkload]) -> None:
        if find_spec("transformers") is None:
            raise RuntimeError("transformers is not installed: there is nothing to compare with")
        async with Engine(backend, blocks, self._sizes.engine).running() as engine:
            for workload in self._workloads():
                say(f"  {workload.name}: {len(workload.prompts)} requests, {workload.output_tokens} output tokens")
                served.append(await serve(engine, workload))
                say(f"  ours: {served[-1].output_tokens_per_s:,.0f} output tokens/s")

    async def _products(self, ceilings: Ceilings) -> None:
        model = self._model
        rows, copy_bytes_per_s = self._sizes.products, ceilings.copy_bytes_per_s
        figures = measure_products(model.config, model.dtype, model.device, rows, copy_bytes_per_s)
        self._results.products += figures
        for f in figures:
            say(f"  {f.what}, {f.rows} rows: {f.ours_s * 1e6:.1f} us, {f.share:.0%}; torch {f.torch_s * 1e6:.1f} us")

    def _workloads(self) -> list[Workload]:
        sizes, vocab = self._sizes, self._model.config.vocab_size
        like = sharegpt_like(sizes.requests, vocab, 1, scale=sizes.length_scale, longest=sizes.longest)
        shared = shared_prefix(
            sizes.requests,
            vocab,
            2,
            groups=sizes.groups,
            prefix_tokens=sizes.prefix_tokens,
            scale=sizes.length_scale,
            longest=sizes.longest,
        )
        return [like, shared]

    async def _compare(self, served: list[ServedWorkload]) -> None:
        """Compare with transformers; it blocks this thread, but nothing else runs on the loop at this time."""
        theirs = Transformers(self._model, small=self._model.device.type == "cpu")
        for done, ours in enumerate(served):
            left_s = (self._until_s - time.monotonic()) / (len(served) - done) - _COMPARE_S
            answered = theirs.serve(ours.workload, min(max(left_s, 1.0), _DEADLINE_S))
            given_up = f", {answered.unanswered} requests given up: less than that" if answered.unanswered else ""
            say(f"  {ours.workload.name}, transformers: {answered.output_tokens_per_s:,.0f} output tokens/s{given_up}")
            self._results.comparisons.append(
                Comparison(
                    workload=ours.workload.name,
                    requests=len(ours.workload.prompts),
                    input_tokens=ours.workload.input_tokens,
                    output_tokens=ours.workload.output_tokens,
                    ours_tokens_per_s=ours.output_tokens_per_s,
                    ours_cached_tokens=ours.cached_tokens or 0,
                    theirs_tokens_per_s=answered.output_tokens_per_s,
                    theirs_unanswered=answered.unanswered,
                    theirs_attention=answered.attention,
                    agreement=theirs.agreement(ours.answers, answered),
                )
            )
            self._keep()


def _give_back(device: torch.device) -> None:
    """Free memory that nothing refers to, because the next engine asks the card how much is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


async def run_sections(
    sections: Mapping[str, Section], results: Results, keep: Callable[[], None], until_s: float
) -> None:
    """Run the sections one after another, as long as `time.monotonic()` is below `until_s`. A section that fails or
    does not begin is noted, and the others still run, because device time is scarce."""
    for name, work in sections.items():
        say(name)
        try:
            if time.monotonic() >= until_s:
                raise TimeoutError("not begun: the time limit of the whole run has passed")
            await work()
        except Exception as error:
            results.failures[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            say(f"  failed: {results.failures[name]}")
        keep()
