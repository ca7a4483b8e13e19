"""A forward pass over `StepTensors` in plain torch, for tests in which interpreted kernels would be slow."""

from __future__ import annotations

from torch import Tensor

from engine.backend.cuda.backend import Forward
from engine.backend.cuda.kernels.step import StepTensors
from engine.model.decoder import Decoder
from tests.engine.cuda.stepping import TorchAttention


def torch_forward(model: Decoder, max_rows: int) -> Forward:
    """Return a forward like `CudaDecoder.forward`; the next step overwrites its logits."""
    attention = TorchAttention(model.config)
    logits = model.weights.embedding.new_empty(max_rows, model.config.vocab_size)

    def forward(step: StepTensors, pool: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            store(step.slots, pool[:, layer], kv)
            out = q.new_empty(len(q), q.shape[1] * q.shape[2])
            split = step.prefill.tokens if step.prefill else 0
            if step.prefill:
                attention.prefill(layer, q[:split], pool, out[:split], step.prefill)
            if step.decode:
                attention.decode(layer, q[split:], pool, out[split:], step.decode)
            return out

        hidden = model.hidden(step.tokens, step.positions, attend, step.rows)
        found = logits[: len(hidden)]
        return found.copy_(model.logits(hidden))

    return forward


def store(slots: Tensor, pages: Tensor, kv: Tensor) -> None:
    """Store kv [T, 2, kv_heads, dim] into pages [block, 2, slot, kv_head, dim], except for slots of -1."""
    block_size = pages.shape[2]
    for slot, one in zip(slots.tolist(), kv, strict=True):
        if slot >= 0:
            pages[slot // block_size, :, slot % block_size] = one
