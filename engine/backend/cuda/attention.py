"""Attention over the paged pool behind one seam, and its default: this package's Triton kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.backend.cuda.kernels.decode import decode_scratch, paged_decode
from engine.backend.cuda.kernels.prefill import paged_prefill, prefill_scratch, tiling_for
from engine.backend.cuda.kernels.step import DecodeTensors, PrefillTensors, StepTensors
from engine.model.config import ModelConfig


class AttentionKernels(Protocol):
    """Causal attention, within each sequence and the layer's window, over keys and values already in their pages.

    Queries [rows, heads, dim] are rows of a wider matrix (contiguous within a row); `out` is [rows, heads * dim];
    `pool` is `KvPool.data`. A row's bits must depend only on its own sequence, not on the rest of the step.
    """

    def begin(self, step: StepTensors) -> None:
        """Prepare for the layers of `step`. For a step without prefill this call reads and writes nothing, so that the
        step may be captured in a CUDA graph."""

    def prefill(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: PrefillTensors) -> None:
        """Attend for chunks of prompts. `tensors` is the prefill part of the step given to `begin`."""

    def decode(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: DecodeTensors) -> None:
        """Attend for one row of each sequence, on a fixed grid that may be captured. Padding rows become 0."""


class TritonAttention:
    """See `AttentionKernels`. All calls share one scratch of each kind, so they must be on one stream."""

    def __init__(self, config: ModelConfig, *, rows: int, tokens: int, device: torch.device) -> None:
        """Allocate scratch for decode steps of up to `rows` rows with tables of up to `tokens` tokens."""
        self._windows = config.windows
        self._scale = config.head_dim**-0.5
        self._scratch = decode_scratch(rows, tokens, config.heads, config.head_dim, device)
        tiling = tiling_for(config.heads, config.kv_heads, device)
        self._prefill_scratch = prefill_scratch(tiling, config.head_dim, device)

    def begin(self, step: StepTensors) -> None:
        """Nothing to prepare."""

    def prefill(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: PrefillTensors) -> None:
        """See `AttentionKernels.prefill`."""
        window, scratch = self._windows[layer], self._prefill_scratch
        paged_prefill(q, pool, layer, out, tensors, scratch, window=window, scale=self._scale)

    def decode(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: DecodeTensors) -> None:
        """See `AttentionKernels.decode`."""
        paged_decode(q, pool, layer, out, tensors, self._scratch, window=self._windows[layer], scale=self._scale)
