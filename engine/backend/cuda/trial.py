"""Synthetic steps: the step that takes the most memory, and small steps that make kernels compile before requests come.

All of them use only block 0, so they work with any pool, and no later step reads what they leave in it.
"""

from __future__ import annotations

from dataclasses import replace

from engine.backend.cuda.kernels.tiling import MAX_PARTS, PART_KEYS
from engine.sched.plan import SequenceChunk, StepPlan
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0)
_DEAREST = SamplingParams(temperature=1, top_p=0.9, repetition_penalty=1.1, logprobs=20)
"""The most expensive sampling: sorts the vocabulary, changes logits, reports log-probabilities."""


def largest_step(max_step_tokens: int, max_running: int, max_tokens: int, block_size: int) -> StepPlan:
    """Return the step with the most tokens, the most rows of logits, the most expensive sampling and the widest block
    tables: those of sequences of `max_tokens`. Entries after a chunk's own blocks are not read."""
    count = min(max_step_tokens // max_running, max_tokens)
    chunks = [_prefill(-1 - i, count, block_size, _DEAREST) for i in range(max_running)]
    return StepPlan(tuple(replace(chunk, blocks=[0] * -(-max_tokens // block_size)) for chunk in chunks))


def warm_up_steps(max_step_tokens: int, max_running: int, max_tokens: int, block_size: int) -> list[StepPlan]:
    """Return steps within these bounds, in the sizes for which Triton compiles separate variants: prefill, a prompt's
    end after a long prefix, decode, and prefill with decode."""
    counts = [count for count in (1, 5, 16) if count <= min(max_step_tokens, max_tokens)]
    prefills = [_prefill(-1, count, block_size, _GREEDY) for count in counts]
    decodes = [_decode(request_id) for request_id in (-2, -3)]
    # Block 0 may hold NaN, so the prefix is written before it is read.
    whole = min(block_size, max_tokens)
    written = [
        _prefill(-4, min(max_step_tokens, whole - start), block_size, _GREEDY, start=start)
        for start in range(0, whole, max_step_tokens)
    ]
    behind = _prefill(-4, 1, block_size, _GREEDY, start=min(max_tokens - 1, MAX_PARTS * PART_KEYS))
    steps = [StepPlan((chunk,)) for chunk in (*prefills, *written, behind, decodes[0])]
    if max_running > 2 and max_step_tokens > 6:
        steps.append(StepPlan((*prefills[-2:-1], *decodes)))
    return steps


def _prefill(
    request_id: int, count: int, block_size: int, sampling: SamplingParams, *, start: int = 0
) -> SequenceChunk:
    prompt, blocks = [0] * (start + count), [0] * -(-(start + count) // block_size)
    return SequenceChunk(Request(request_id, prompt, 2, sampling), start, prompt[start:], blocks, True, False)


def _decode(request_id: int) -> SequenceChunk:
    return SequenceChunk(Request(request_id, [0], 2, _GREEDY, output_tokens=[0]), 1, [0], [0], True, True)
