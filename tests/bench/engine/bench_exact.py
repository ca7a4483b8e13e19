"""The cost of `--exact` on the CPU: steps with and without it, on one checkpoint, in one run.

    python -m tests.bench.engine.bench_exact [--rounds 6] [--folder CHECKPOINT]

Times are the CPU time of the one computing thread, the minimum of the rounds, so that other work on the machine has
little effect.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch

from engine.backend.torch_backend import TorchBackend
from engine.model.checkpoint import make_checkpoint
from engine.model.decoder import load_decoder
from engine.sched.plan import SequenceChunk
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams

BLOCK_SIZE, BLOCKS = 16, 1400
PROMPT, NEW = 2048, 64
Step = Callable[[], tuple[SequenceChunk, ...]]


def chunk(ids: list[int], start: int, end: int, first_block: int) -> SequenceChunk:
    """Return tokens start .. end - 1 of a sequence in neighbouring blocks."""
    request = Request(first_block, ids, 5, SamplingParams(temperature=0))
    blocks = range(first_block, first_block - (-end // BLOCK_SIZE))
    return SequenceChunk(request, start, ids[start:end], blocks, True, start > 0)


def decodes(ids: list[int], contexts: list[int]) -> tuple[SequenceChunk, ...]:
    """Return one decode token for each of some sequences."""
    chunks, first = [], 0
    for context in contexts:
        chunks.append(chunk(ids[: context + 1], context, context + 1, first))
        first += context // BLOCK_SIZE + 1
    return tuple(chunks)


def steps(ids: list[int]) -> dict[str, Step]:
    """Return the steps that are timed."""
    return {
        f"{PROMPT:,} cold tokens": lambda: (chunk(ids, 0, PROMPT, 0),),
        f"{NEW} behind {PROMPT:,} cached": lambda: (chunk(ids, PROMPT, PROMPT + NEW, 0),),
        "decode, 1 sequence of 512": lambda: decodes(ids, [512]),
        "decode, 16 of 128": lambda: decodes(ids, [128] * 16),
        "decode, 16 of 512": lambda: decodes(ids, [512] * 16),
        "decode, 16 of 128 to 2,048": lambda: decodes(ids, list(range(128, PROMPT + 1, 128))),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", help="checkpoint; the one that make_checkpoint writes by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        if arguments.folder is None:
            make_checkpoint(made)
        model = load_decoder(arguments.folder or made)
    backends = {False: TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE)}
    start_s = time.perf_counter()
    backends[True] = TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE, exact=True)
    print(f"asking the libraries at the start took {time.perf_counter() - start_s:.2f} s\n")
    for backend in backends.values():
        backend.pool.data.normal_()
    ids = torch.randint(0, model.config.vocab_size, (PROMPT + NEW,)).tolist()
    print("| | `--no-exact` | `--exact` | ratio |\n|---|--:|--:|--:|")
    for name, step in steps(ids).items():
        least = dict.fromkeys(backends, float("inf"))
        for _ in range(arguments.rounds):
            for exact, backend in backends.items():
                start_s = time.thread_time()
                backend.logits(step())
                least[exact] = min(least[exact], time.thread_time() - start_s)
        print(
            f"| {name} | {least[False] * 1e3:.1f} ms | {least[True] * 1e3:.1f} ms | {least[True] / least[False]:.2f} |"
        )


if __name__ == "__main__":
    main()
