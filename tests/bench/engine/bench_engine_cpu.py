"""Speed of the torch backend on the CPU, compared with transformers on the same checkpoint in the same run.

    python -m tests.bench.engine.bench_engine_cpu [--threads 1] [--repeats 5]

Each round measures every contender once, so that other work on the machine affects all of them. A figure is the median
of the rounds' ratios. transformers runs SDPA and computes only the last row of logits, as a server would.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
SEQUENCES, STEPS = 16, 16
EQUAL_TOKENS = (128, 512)
MIXED_TOKENS = tuple(range(128, 2049, 128))
"""Contexts of a served batch: generate pads each to the longest, the engine does not."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Both contenders, loaded from one checkpoint."""

    theirs: Any
    ours: TorchBackend

    def prompt(self, tokens: int) -> list[int]:
        """Return random token ids."""
        ids: list[int] = torch.randint(0, self.ours.model.config.vocab_size, (tokens,)).tolist()
        return ids

    def chunk(self, request: Request, start: int, end: int, first_block: int) -> SequenceChunk:
        """Return tokens start .. end of the request, with blocks counted from `first_block`."""
        known = [*request.prompt_tokens, *request.output_tokens]
        blocks = range(first_block, first_block - (-end // BLOCK_SIZE))
        return SequenceChunk(request, start, known[start:end], blocks, end == len(known), bool(request.output_tokens))

    async def step_s(self, *chunks: SequenceChunk) -> float:
        """Return the seconds of one step, as its caller sees it; sampled tokens are appended to their requests."""
        start_s = time.perf_counter()
        result = await self.ours.run(StepPlan(chunks))
        elapsed_s = time.perf_counter() - start_s
        for chunk in chunks:
            if chunk.samples:
                chunk.request.output_tokens.append(result.sampled[chunk.request.id].token)
        return elapsed_s

    async def prefill_speed(self) -> float:
        """Return tokens per second of a cold prefill, as a multiple of transformers' forward."""
        ids = self.prompt(PREFILL_TOKENS)
        start_s = time.perf_counter()
        with torch.inference_mode():
            self.theirs(torch.tensor([ids]), logits_to_keep=1)
        theirs_s = time.perf_counter() - start_s
        return theirs_s / await self.step_s(self.chunk(_greedy(0, ids), 0, len(ids), 0))

    async def decode_speed(self, contexts: Sequence[int]) -> float:
        """Return decoded tokens per second, as a multiple of transformers' generate with the same batch."""
        prompts = [self.prompt(tokens) for tokens in contexts]
        steps = _StepTimes()
        padded = torch.tensor([[0] * (max(contexts) - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (max(contexts) - len(p)) + [1] * len(p) for p in prompts])
        self.theirs.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=STEPS + 1,
            min_new_tokens=STEPS + 1,
            stopping_criteria=StoppingCriteriaList([steps]),
        )
        requests = [_greedy(i, ids) for i, ids in enumerate(prompts)]
        rooms = [(tokens + STEPS) // BLOCK_SIZE + 1 for tokens in contexts]
        first = [sum(rooms[:i]) for i in range(len(rooms))]
        for request, block in zip(requests, first, strict=True):
            await self.step_s(self.chunk(request, 0, len(request.prompt_tokens), block))
        ours_s = 0.0
        for step in range(STEPS):
            starts = [tokens + step for tokens in contexts]
            chunks = (self.chunk(r, n, n + 1, b) for r, n, b in zip(requests, starts, first, strict=True))
            ours_s += await self.step_s(*chunks)
        return (steps.times_s[-1] - steps.times_s[0]) / ours_s

    async def warm_share(self) -> float:
        """Return the time to first token with only `NEW_TOKENS` uncached, as a share of the cold time."""
        total = PREFILL_TOKENS + NEW_TOKENS
        ids = self.prompt(total)
        cold_s = await self.step_s(self.chunk(_greedy(0, ids), 0, total, 0))
        return await self.step_s(self.chunk(_greedy(1, ids), PREFILL_TOKENS, total, 0)) / cold_s


class _StepTimes(StoppingCriteria):
    """Never stops; notes when each step of generate has ended."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _greedy(request_id: int, prompt: list[int]) -> Request:
    return Request(request_id, prompt, max_tokens=STEPS + 2, sampling=SamplingParams(temperature=0))


async def measure(bench: Bench, repeats: int) -> None:
    """Print each ratio with its target."""
    decode = "decode, 16 sequences of {} tokens, x transformers generate"
    figures: list[tuple[str, Callable[[], Awaitable[float]], str]] = [
        (f"prefill of {PREFILL_TOKENS} tokens, x transformers forward", bench.prefill_speed, ">= 0.90"),
        (f"warm TTFT, {PREFILL_TOKENS} cached + {NEW_TOKENS} new, / cold TTFT", bench.warm_share, "<= 0.15"),
        (decode.format("128 .. 2048"), partial(bench.decode_speed, MIXED_TOKENS), ">= 2.00"),
    ]
    for tokens in EQUAL_TOKENS:
        equal = partial(bench.decode_speed, (tokens,) * SEQUENCES)
        figures.append((decode.format(f"{tokens} equal"), equal, ">= 2.00"))
    rounds: list[list[float]] = []
    for number in range(repeats + 1):
        values = [await figure() for _, figure, _ in figures]
        if number:  # the first round warms up
            rounds.append(values)
            print(f"round {number}: " + "  ".join(f"{value:.2f}" for value in values), flush=True)
    for i, (name, _, target) in enumerate(figures):
        values = [measured[i] for measured in rounds]
        print(f"{name}: {statistics.median(values):.2f} (target {target}; {min(values):.2f} .. {max(values):.2f})")


async def main() -> None:
    """Make the checkpoint, load both contenders, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both contenders, default 1")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the warm-up, default 5")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        blocks = sum((tokens + STEPS) // BLOCK_SIZE + 1 for tokens in MIXED_TOKENS)
        ours = TorchBackend(load_decoder(folder), block_count=blocks, block_size=BLOCK_SIZE, threads=arguments.threads)
        await measure(Bench(theirs, ours), arguments.repeats)
        await ours.close()


if __name__ == "__main__":
    asyncio.run(main())
