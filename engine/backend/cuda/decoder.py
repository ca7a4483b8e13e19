"""The decoder of `engine.model.decoder` for CUDA: fused kernels between matrix products, all in buffers made once.

Products of few rows have their own kernel; cuBLAS computes the others.

The residual stream stays in one buffer; every norm except the first also adds to it. No code here waits for the
device, and no allocation has a size that is read from the device. So a step without prefill can be captured in a CUDA
graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engine.backend.cuda.attention import AttentionKernels
from engine.backend.cuda.kernels.activation import silu_mul
from engine.backend.cuda.kernels.linear import gated_linear, linear, suits
from engine.backend.cuda.kernels.norm import add_rms_norm, rms_norm
from engine.backend.cuda.kernels.rope_store import rope_store
from engine.backend.cuda.kernels.step import StepTensors
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.projection import Projection
from engine.model.rope import inverse_frequencies, turns


@dataclass(frozen=True, slots=True)
class DecoderBuffers:
    """All memory that a forward pass writes besides the KV pool, for T tokens and R rows of logits."""

    residual: Tensor
    """[T, hidden_size]"""
    hidden: Tensor
    """[T, hidden_size]"""
    qkv: Tensor
    """[T, (heads + 2 kv_heads) * head_dim]"""
    attended: Tensor
    """[T, heads * head_dim]"""
    gate_up: Tensor
    """[T, 2 intermediate_size]"""
    activated: Tensor
    """[T, intermediate_size]"""
    last_residual: Tensor
    """[R, hidden_size]"""
    last_attended: Tensor
    """[R, heads * head_dim]"""
    head: Tensor
    """[R, vocab_size] in the model's type."""
    logits: Tensor
    """[R, vocab_size] float32; `head` itself if that is float32."""

    @staticmethod
    def make(
        config: ModelConfig, *, tokens: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> DecoderBuffers:
        """Return buffers for steps of up to `tokens` tokens and `rows` rows of logits; on "meta" without memory."""
        queries = config.heads * config.head_dim
        qkv = queries + 2 * config.kv_heads * config.head_dim

        def matrix(count: int, columns: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty((count, columns), dtype=kind, device=device)

        head = matrix(rows, config.vocab_size)
        return DecoderBuffers(
            residual=matrix(tokens, config.hidden_size),
            hidden=matrix(tokens, config.hidden_size),
            qkv=matrix(tokens, qkv),
            attended=matrix(tokens, queries),
            gate_up=matrix(tokens, 2 * config.intermediate_size),
            activated=matrix(tokens, config.intermediate_size),
            last_residual=matrix(rows, config.hidden_size),
            last_attended=matrix(rows, queries),
            head=head,
            logits=head if dtype == torch.float32 else matrix(rows, config.vocab_size, torch.float32),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, even on device "meta", for planning."""
        tensors = {id(tensor): tensor for tensor in (getattr(self, field.name) for field in fields(self))}
        return sum(tensor.nbytes for tensor in tensors.values())

    def leading(self, tokens: int, rows: int) -> DecoderBuffers:
        """Return views for a smaller step. Raises ValueError for a larger one."""
        if tokens > len(self.residual) or rows > len(self.logits):
            raise ValueError(
                f"a step of {tokens} tokens and {rows} rows of logits is larger than the buffers, "
                f"made for {len(self.residual)} and {len(self.logits)}"
            )
        by_row = ("last_residual", "last_attended", "head", "logits")
        return DecoderBuffers(
            **{f.name: getattr(self, f.name)[: rows if f.name in by_row else tokens] for f in fields(self)}
        )

    def only(self, rows: Tensor) -> DecoderBuffers:
        """Return views with only `rows` [R] of the residual stream and attention, without the layer's other tokens."""
        count = len(rows)
        torch.index_select(self.residual, 0, rows, out=self.last_residual)
        torch.index_select(self.attended, 0, rows, out=self.last_attended)
        return replace(
            self,
            residual=self.last_residual,
            attended=self.last_attended,
            hidden=self.hidden[:count],
            gate_up=self.gate_up[:count],
            activated=self.activated[:count],
        )


class CudaDecoder:
    """A loaded model with CUDA kernels. Holds no state of any sequence; call it under `torch.inference_mode()`."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._frequencies = inverse_frequencies(model.config.rope, model.config.head_dim).to(model.device)

    def buffers(self, tokens: int, rows: int) -> DecoderBuffers:
        """Return buffers for this model's steps of up to `tokens` tokens and `rows` rows of logits."""
        model = self.model
        return DecoderBuffers.make(model.config, tokens=tokens, rows=rows, dtype=model.dtype, device=model.device)

    def forward(
        self, step: StepTensors, pool: Tensor, attention: AttentionKernels, buffers: DecoderBuffers | None = None
    ) -> Tensor:
        """Store the step's keys and values in `pool` (`KvPool.data`) -> float32 logits [R, vocab_size].

        The logits are in `buffers`, until these are used again. None: the logits are in new buffers.
        """
        weights, eps = self.model.weights, self.model.config.rms_norm_eps
        tokens, rows = len(step.tokens), len(step.tokens) if step.rows is None else len(step.rows)
        own = self.buffers(tokens, rows) if buffers is None else buffers.leading(tokens, rows)
        attention.begin(step)
        turn = torch.view_as_real(turns(step.positions, self._frequencies, self.model.config.rope.attention_factor))
        torch.index_select(weights.embedding, 0, step.tokens, out=own.residual)
        norms = [*(layer.input_norm for layer in weights.layers), weights.norm]
        rms_norm(own.residual, norms[0], eps, own.hidden)
        for i, layer in enumerate(weights.layers):
            _project(layer.qkv, own.hidden, own.qkv)
            self._attend(i, step, turn, pool, attention, own)
            if step.rows is not None and i == len(weights.layers) - 1:
                # After the last layer's attention, only the rows that need logits are read.
                if not rows:
                    return own.logits
                own = own.only(step.rows)
            _project(layer.output, own.attended, own.hidden)
            add_rms_norm(own.hidden, own.residual, layer.mlp_norm, eps, own.hidden)
            _project_gated(layer.gate_up, own.hidden, own.gate_up, own.activated)
            _project(layer.down, own.activated, own.hidden)
            add_rms_norm(own.hidden, own.residual, norms[i + 1], eps, own.hidden)
        _project(weights.head, own.hidden, own.head)
        if own.logits.dtype != own.head.dtype:
            own.logits.copy_(own.head)
        return own.logits

    def _attend(
        self, i: int, step: StepTensors, turn: Tensor, pool: Tensor, attention: AttentionKernels, own: DecoderBuffers
    ) -> None:
        """own.qkv -> own.attended. Keys and values of all tokens are stored before they are read."""
        config, norm = self.model.config, self.model.weights.layers[i].qk_norm
        heads, kv_heads, eps = config.heads, config.kv_heads, config.rms_norm_eps
        rope_store(own.qkv, turn, step.slots, norm, eps, pool, i, heads=heads, kv_heads=kv_heads)
        q = own.qkv.view(len(own.qkv), heads + 2 * kv_heads, config.head_dim)[:, :heads]
        split = 0 if step.prefill is None else step.prefill.tokens
        if step.prefill is not None:
            attention.prefill(i, q[:split], pool, own.attended[:split], step.prefill)
        if step.decode is not None:
            attention.decode(i, q[split:], pool, own.attended[split:], step.decode)


def _project(projection: Projection, x: Tensor, out: Tensor) -> None:
    """x [T, in] -> out [T, out]."""
    plain = projection.plain
    if plain is not None and suits(x, plain[0]):
        linear(x, *plain, out)
    else:
        projection.into(x, out)


def _project_gated(projection: Projection, x: Tensor, product: Tensor, out: Tensor) -> None:
    """x [T, hidden] -> out [T, I], silu(gate) * up. `product` [T, 2 I] is scratch for gate and up."""
    plain = projection.plain
    if plain is not None and plain[1] is None and suits(x, plain[0]):
        gated_linear(x, plain[0], out)
    else:
        _project(projection, x, product)
        silu_mul(product, out)
