"""Speed of the torch backend on the CPU beside transformers, on one checkpoint, in one run.

    python -m tests.bench.bench_engine_cpu [--threads 1] [--repeats 5]

Each round measures every contender once, so that what else the machine does falls on all of them; a figure is the
median of the rounds' ratios. transformers runs its SDPA attention and computes the last row of logits only, as a server would.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from engine.backend.torch_backend import TorchBackend
from engine.model.checkpoint import make_checkpoint
from engine.model.decoder import load_decoder
from engine.sched.plan import SequenceChunk, StepPlan
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams

BLOCK_SIZE = 16
PREFILL_TOKENS, NEW_TOKENS = 2048, 64
SEQUENCES, CONTEXT_TOKENS, STEPS = 16, 512, 24


@dataclass(frozen=True, slots=True)
class Bench:
    """Both contenders, loaded from one checkpoint."""

    theirs: Any
    ours: TorchBackend

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids."""
        ids: list[int] = torch.randint(0, self.ours.model.config.vocab_size, (tokens,)).tolist()
        return ids

    def chunk(self, request: Request, start: int, end: int, first_block: int) -> SequenceChunk:
        """Tokens start .. end of the request, its blocks counted from `first_block`."""
        known = [*request.prompt_tokens, *request.output_tokens]
        blocks = range(first_block, first_block - (-end // BLOCK_SIZE))
        return SequenceChunk(request, start, known[start:end], blocks, end == len(known), bool(request.output_tokens))

    async def step_s(self, *chunks: SequenceChunk) -> float:
        """One step, timed as its caller sees it; sampled tokens are appended to their requests."""
        start_s = time.perf_counter()
        result = await self.ours.run(StepPlan(chunks))
        elapsed_s = time.perf_counter() - start_s
        for chunk in chunks:
            if chunk.samples:
                chunk.request.output_tokens.append(result.sampled[chunk.request.id].token)
        return elapsed_s

    async def prefill_speed(self) -> float:
        """Tokens per second of a cold prefill, as a multiple of transformers' forward."""
        ids = self.prompt(PREFILL_TOKENS)
        start_s = time.perf_counter()
        with torch.inference_mode():
            self.theirs(torch.tensor([ids]), logits_to_keep=1)
        theirs_s = time.perf_counter() - start_s
        return theirs_s / await self.step_s(self.chunk(_greedy(0, ids), 0, len(ids), 0))

    async def decode_speed(self) -> float:
        """Tokens per second of `SEQUENCES` decoding sequences, as a multiple of transformers' generate."""
        prompts = [self.prompt(CONTEXT_TOKENS) for _ in range(SEQUENCES)]
        steps = _StepTimes()
        self.theirs.generate(
            torch.tensor(prompts),
            do_sample=False,
            max_new_tokens=STEPS + 1,
            min_new_tokens=STEPS + 1,
            stopping_criteria=StoppingCriteriaList([steps]),
        )
        requests = [_greedy(i, ids) for i, ids in enumerate(prompts)]
        room = (CONTEXT_TOKENS + STEPS) // BLOCK_SIZE + 1
        for i, request in enumerate(requests):
            await self.step_s(self.chunk(request, 0, CONTEXT_TOKENS, i * room))
        ours_s = 0.0
        for step in range(CONTEXT_TOKENS, CONTEXT_TOKENS + STEPS):
            ours_s += await self.step_s(*(self.chunk(r, step, step + 1, i * room) for i, r in enumerate(requests)))
        return (steps.times_s[-1] - steps.times_s[0]) / ours_s

    async def warm_share(self) -> float:
        """Time to the first token where all but `NEW_TOKENS` of the prompt are cached, as a share of the cold time."""
        total = PREFILL_TOKENS + NEW_TOKENS
        ids = self.prompt(total)
        cold_s = await self.step_s(self.chunk(_greedy(0, ids), 0, total, 0))
        return await self.step_s(self.chunk(_greedy(1, ids), PREFILL_TOKENS, total, 0)) / cold_s


class _StepTimes(StoppingCriteria):
    """Never stops; notes when each of generate's steps has ended."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _greedy(request_id: int, prompt: list[int]) -> Request:
    return Request(request_id, prompt, max_tokens=STEPS + 2, sampling=SamplingParams(temperature=0))


async def measure(bench: Bench, repeats: int) -> None:
    """Print each ratio with its target."""
    figures: list[tuple[str, Callable[[], Any], str]] = [
        (f"prefill of {PREFILL_TOKENS} tokens, x transformers forward", bench.prefill_speed, ">= 0.90"),
        (f"decode of {SEQUENCES} x {CONTEXT_TOKENS} tokens, x transformers generate", bench.decode_speed, ">= 2.00"),
        (f"warm TTFT, {PREFILL_TOKENS} cached + {NEW_TOKENS} new, / cold TTFT", bench.warm_share, "<= 0.15"),
    ]
    rounds = []
    for number in range(repeats + 1):
        values = [await figure() for _, figure, _ in figures]
        if number:  # the first round warms up
            rounds.append(values)
            print(f"round {number}: " + "  ".join(f"{value:.2f}" for value in values), flush=True)
    for (name, _, target), values in zip(figures, zip(*rounds, strict=True), strict=True):
        print(f"{name}: {statistics.median(values):.2f} (target {target}; {min(values):.2f} .. {max(values):.2f})")


async def main() -> None:
    """Make the checkpoint, load both, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both, default 1")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the warm-up, default 5")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        blocks = SEQUENCES * ((CONTEXT_TOKENS + STEPS) // BLOCK_SIZE + 1)
        ours = TorchBackend(
            load_decoder(folder), block_count=blocks, block_size=BLOCK_SIZE, threads=arguments.threads
        )
        await measure(Bench(theirs, ours), arguments.repeats)
        await ours.close()


if __name__ == "__main__":
    asyncio.run(main())
