"""Prefill attention by optional libraries: FlashInfer, and FlashAttention 3 for Hopper.

Decode stays with the Triton kernels: they split a sequence by its length alone, and run in CUDA graphs without a host
plan per step. Both libraries take pages with strides, so they get the block-major pool directly (for FlashInfer, see
its issues 506 and 702). Both are set not to split keys, which would make a row's bits depend on its batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.backend.cuda.attention import AttentionKernels
from engine.backend.cuda.kernels.step import DecodeTensors, PrefillTensors, StepTensors
from engine.model.config import ModelConfig

_WORKSPACE_BYTES = 128 * 2**20
"""The size that FlashInfer's documentation advises."""


class FlashInferAttention:
    """See `AttentionKernels`. `begin` waits for the device once per step with prefill chunks, to read lengths.

    `flashinfer`: the module (`BatchPrefillWithPagedKVCacheWrapper` of 0.6). `decode`: the attention for decode rows.
    """

    def __init__(
        self,
        flashinfer: Any,
        config: ModelConfig,
        decode: AttentionKernels,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._decode = decode
        self._block_size = block_size
        self._dtype = dtype
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = {window: wrapper(workspace, "NHD") for window in set(config.windows)}

    def begin(self, step: StepTensors) -> None:
        """See `AttentionKernels.begin`."""
        if step.prefill is not None:
            self._plan(step.prefill)

    def prefill(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: PrefillTensors) -> None:
        """See `AttentionKernels.prefill`."""
        self._wrappers[self._config.windows[layer]].run(q, pool[:, layer], out=out.view(q.shape))

    def decode(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: DecodeTensors) -> None:
        """See `AttentionKernels.decode`."""
        self._decode.decode(layer, q, pool, out, tensors)

    def _plan(self, tensors: PrefillTensors) -> None:
        # A plan is written into the wrapper's page-locked buffer and copied to the device without waiting. The next
        # plan overwrites that buffer. That is safe: `cpu` waits for this stream, and so for the copy of the last plan.
        starts, contexts = (
            torch.cat((tensors.query_starts, tensors.contexts)).cpu().tensor_split([len(tensors.tables) + 1])
        )
        lengths = contexts + starts.diff()
        pages = -(-lengths // self._block_size)
        page_starts = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        indices = torch.cat([table[:count] for table, count in zip(tensors.tables, pages.tolist(), strict=True)])
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                starts,
                page_starts,
                indices,
                (lengths - 1) % self._block_size + 1,
                self._config.heads,
                self._config.kv_heads,
                self._config.head_dim,
                self._block_size,
                causal=True,
                sm_scale=self._config.head_dim**-0.5,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                disable_split_kv=True,
            )


class FlashAttention3:
    """See `AttentionKernels`. Never waits for the device.

    `interface`: the module `flash_attn_interface`. `decode`: the attention for decode rows.
    """

    def __init__(self, interface: Any, config: ModelConfig, decode: AttentionKernels) -> None:
        self._attend = interface.flash_attn_with_kvcache
        self._config = config
        self._decode = decode
        self._lengths: Tensor | None = None

    def begin(self, step: StepTensors) -> None:
        """See `AttentionKernels.begin`."""
        if step.prefill is not None:
            self._lengths = step.prefill.contexts + step.prefill.query_starts.diff()

    def prefill(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: PrefillTensors) -> None:
        """See `AttentionKernels.prefill`."""
        window = self._config.windows[layer]
        attended = self._attend(
            q,
            pool[:, layer, 0],
            pool[:, layer, 1],
            cache_seqlens=self._lengths,
            page_table=tensors.tables,
            cu_seqlens_q=tensors.query_starts,
            max_seqlen_q=tensors.tokens,  # An upper bound is enough: it sizes the grid.
            softmax_scale=self._config.head_dim**-0.5,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            num_splits=1,
        )
        out.view(q.shape).copy_(attended)

    def decode(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: DecodeTensors) -> None:
        """See `AttentionKernels.decode`."""
        self._decode.decode(layer, q, pool, out, tensors)
