"""The inputs of one forward pass, as tensors on the device (int32 unless noted)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.backend.cuda.kernels.tiling import Round


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """The leading rows of a step: chunks of prompts."""

    tokens: int
    """Leading rows of `StepTensors.tokens` that these chunks fill."""
    tables: Tensor
    """Blocks of each sequence in order, [S, P]; entries after a sequence's last block are not read."""
    query_starts: Tensor
    """First row of each chunk, and the end of the last chunk, [S + 1]."""
    contexts: Tensor
    """Tokens of each sequence before its chunk, [S]."""
    tiles: Tensor
    """Programs for each KV head, [N, 5]: see `tiling.Tiles`."""
    merged: Tensor
    """Rows of `tiles` whose tile has more than one part, [M]: see `tiling.Tiles`."""
    rounds: tuple[Round, ...]
    """Launches of the prefill kernel, on the host."""


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """The rows after the prefill chunks: one token of each decoding sequence."""

    tables: Tensor
    """Blocks of each sequence in order, [B, P]; entries after a sequence's last block are not read."""
    lengths: Tensor
    """Tokens that each row attends to, its own included, [B]; 0: a padding row, whose output is zero."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """All inputs of a forward pass besides weights and KV pool."""

    tokens: Tensor
    """The tokens of all chunks, prefill first, then decode tokens, int64 [T]."""
    positions: Tensor
    """Position of each token in its sequence, [T]."""
    slots: Tensor
    """Slot of each token's keys and values, block * block_size + offset, int64 [T]; -1: none (padding)."""
    prefill: PrefillTensors | None
    decode: DecodeTensors | None
    rows: Tensor | None
    """Rows that need logits, int64 [R]; None: all."""
