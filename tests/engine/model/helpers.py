"""Tiny checkpoints written by transformers, and a driver that runs sequences through the paged backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.backend.torch_backend import TorchBackend
from engine.sched.plan import SequenceChunk
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams

VOCAB = 97
GREEDY = SamplingParams(temperature=0)
_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def hf_model(kind: str, **config: Any) -> Any:
    """Return a tiny transformers model of `kind` ("Llama", ...) with random parameters, including norms and biases."""
    made = getattr(transformers, f"{kind}Config")(**{**_SIZE, **config})
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write the model in the format of users' checkpoints."""
    model.save_pretrained(folder, **options)
    return folder


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    return random.Random(seed).choices(range(VOCAB), k=count)


@dataclass
class Driven:
    """One sequence for `drive`: its request, its blocks, and the logits from which its tokens were chosen."""

    prompt: list[int]
    blocks: list[int]
    done: int = 0
    """Leading tokens whose KV is already in the pool, or will be copied from `source`."""
    source: int | None = None
    """The block with the KV of the last of these tokens, if they end within a block."""
    request: Request = field(init=False)
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request = Request(id(self), self.prompt, max_tokens=1000, sampling=GREEDY)

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.request.output_tokens]

    def next_chunk(self, chunk_tokens: int, block_size: int) -> SequenceChunk:
        known = self.known
        end = min(self.done + chunk_tokens, len(known))
        blocks = self.blocks[: -(-end // block_size)]
        samples = end == len(known)
        source, self.source = self.source, None
        return SequenceChunk(self.request, self.done, known[self.done : end], blocks, samples, self.done > 0, source)


def drive(backend: TorchBackend, sequences: Sequence[Driven], *, outputs: int, chunk_tokens: int) -> None:
    """Generate `outputs` tokens of each sequence greedily, with all sequences in every step, and prompts in chunks."""
    while running := [s for s in sequences if len(s.logits) < outputs]:
        chunks = tuple(s.next_chunk(chunk_tokens, backend.pool.block_size) for s in running)
        rows = iter(backend.logits(chunks))
        for sequence, chunk in zip(running, chunks, strict=True):
            sequence.done += len(chunk.tokens)
            if chunk.samples:
                sequence.logits.append(next(rows))
                sequence.request.output_tokens.append(int(sequence.logits[-1].argmax()))


def shuffled_blocks(count: int, per_sequence: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return disjoint block lists of the given lengths, in random order, out of 0 .. count - 1."""
    free = random.Random(seed).sample(range(count), count)
    return [[free.pop() for _ in range(length)] for length in per_sequence]
