"""What one forward pass is told about its tokens, as tensors on the device (int32 unless said)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.backend.cuda.tiling import Round


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """The leading rows of a step: chunks of prompts."""

    tokens: int
    """Leading rows of `StepTensors.tokens` that these chunks fill."""
    tables: Tensor
    """Blocks of each sequence in order, [S, P]; entries behind a sequence's last block are not read."""
    query_starts: Tensor
    """First row of each chunk, and one behind the last, [S + 1]."""
    contexts: Tensor
    """Tokens of each sequence before its chunk, [S]."""
    tiles: Tensor
    """Programs for each KV head, [N, 5], as `tiling.Tiles` says."""
    merged: Tensor
    """Rows of `tiles` whose tile has more than one part, [M], as `tiling.Tiles` says."""
    rounds: tuple[Round, ...]
    """Launches of the prefill kernel, on the host."""


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """The rows behind the prefill chunks: one token of each decoding sequence."""

    tables: Tensor
    """Blocks of each sequence in order, [B, P]; entries behind a sequence's last block are not read."""
    lengths: Tensor
    """Tokens each row attends to, its own included, [B]; 0 is a padding row, whose output is zero."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Everything a forward pass needs besides weights and KV pool."""

    tokens: Tensor
    """All chunks one behind another, prefill first, then decode tokens, int64 [T]."""
    positions: Tensor
    """Position of each token in its sequence, [T]."""
    slots: Tensor
    """block * block_size + offset where each token's keys and values go, int64 [T]; -1: nowhere (padding)."""
    prefill: PrefillTensors | None
    decode: DecodeTensors | None
    rows: Tensor | None
    """Rows whose logits are wanted, int64 [R]; None: all."""
