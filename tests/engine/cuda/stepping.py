"""`CudaDecoder` with the interface for `tests.engine.model.helpers.drive`, and attention in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.backend.cuda.attention import AttentionKernels
from engine.backend.cuda.decoder import CudaDecoder, DecoderBuffers
from engine.backend.cuda.kernels.prefill import tiling_for
from engine.backend.cuda.kernels.step import DecodeTensors, PrefillTensors, StepTensors
from engine.backend.torch_backend import TorchBackend
from engine.backend.torch_kv import KvPool
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.sched.plan import SequenceChunk
from tests.engine.cuda.cutting import prefill_tensors
from tests.engine.model.helpers import Driven, drive, shuffled_blocks, tokens

TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Tolerated distance of a row of logits from the expected row, relative to the expected row's norm."""
TRUNCATED = 0.2
"""The same for bfloat16 in Triton's interpreter. It truncates where devices round, also after each matrix product of
few rows."""
BLOCK_SIZE = 4
PADDING_BLOCK = 10**6
"""Fills tables after a sequence's last block, so that reading there is an error."""


def step_of(
    config: ModelConfig,
    block_size: int,
    chunks: Sequence[SequenceChunk],
    *,
    device: torch.device,
    padding_rows: int = 0,
) -> StepTensors:
    """Return the step's tensors. Chunks of one token after a context are decode rows, then come `padding_rows` rows.

    The step's logits are for the sampling chunks' last rows, in the order of `chunks`.
    """
    with device:
        return _step_of(config, block_size, chunks, padding_rows)


def _step_of(config: ModelConfig, block_size: int, chunks: Sequence[SequenceChunk], padding_rows: int) -> StepTensors:
    decode = [chunk for chunk in chunks if len(chunk.tokens) == 1 and chunk.start]
    prefill = [chunk for chunk in chunks if not any(chunk is other for other in decode)]
    ordered = [*prefill, *decode]
    ends = list(accumulate(len(chunk.tokens) for chunk in ordered))
    last = {id(chunk): end - 1 for chunk, end in zip(ordered, ends, strict=True)}
    places = [(chunk.blocks, chunk.start + i) for chunk in ordered for i in range(len(chunk.tokens))]
    slots = [blocks[position // block_size] * block_size + position % block_size for blocks, position in places]
    tokens = [token for chunk in ordered for token in chunk.tokens]
    return StepTensors(
        tokens=torch.tensor(tokens + [0] * padding_rows),
        positions=_int32([position for _, position in places] + [0] * padding_rows),
        slots=torch.tensor(slots + [-1] * padding_rows),
        prefill=_prefill(config, prefill) if prefill else None,
        decode=_decode(decode, padding_rows) if decode or padding_rows else None,
        rows=torch.tensor([last[id(chunk)] for chunk in chunks if chunk.samples], dtype=torch.int64),
    )


def _prefill(config: ModelConfig, chunks: Sequence[SequenceChunk]) -> PrefillTensors:
    tables = _tables(chunks)
    tiling = tiling_for(config.heads, config.kv_heads, tables.device)
    return prefill_tensors(tiling, [(len(chunk.tokens), chunk.start) for chunk in chunks], tables)


def _decode(chunks: Sequence[SequenceChunk], padding_rows: int) -> DecodeTensors:
    tables = _tables(chunks) if chunks else _int32([[PADDING_BLOCK]])[:0]
    padding = torch.full((padding_rows, tables.shape[1]), PADDING_BLOCK, dtype=torch.int32)
    return DecodeTensors(
        tables=torch.cat((tables, padding)),
        lengths=_int32([chunk.start + 1 for chunk in chunks] + [0] * padding_rows),
    )


def _tables(chunks: Sequence[SequenceChunk]) -> Tensor:
    width = max(len(chunk.blocks) for chunk in chunks) + 1
    return _int32([[*chunk.blocks, *[PADDING_BLOCK] * (width - len(chunk.blocks))] for chunk in chunks])


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Steps:
    """A `CudaDecoder` over a poisoned pool, its buffers poisoned before every step."""

    def __init__(
        self, model: Decoder, attention: AttentionKernels, *, block_count: int, block_size: int, padding_rows: int = 0
    ) -> None:
        self.pool = KvPool(model.config, block_count, block_size, dtype=model.dtype, device=model.device)
        self.pool.data.fill_(torch.nan)
        self._decoder = CudaDecoder(model)
        self._attention = attention
        self._buffers = self._decoder.buffers(200, 20)
        self._padding_rows = padding_rows

    @torch.inference_mode()
    def logits(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Return the same as `TorchBackend.logits`."""
        model = self._decoder.model
        step = step_of(model.config, self.pool.block_size, chunks, device=model.device, padding_rows=self._padding_rows)
        poison(self._buffers)
        return self._decoder.forward(step, self.pool.data, self._attention, self._buffers).clone()


def poison(buffers: DecoderBuffers) -> None:
    """Fill the buffers with NaN."""
    for name in buffers.__slots__:
        getattr(buffers, name).fill_(torch.nan)


def check_mixed_steps(model: Decoder, attention: AttentionKernels) -> None:
    """Check that both backends' logits agree, and that they write the same slots, for the tokens that the reference
    chose. The steps mix first and later chunks of prompts, decode rows and padding rows."""
    steps = Steps(model, attention, block_count=30, block_size=BLOCK_SIZE, padding_rows=1)
    both = _Both(TorchBackend(model, block_count=30, block_size=BLOCK_SIZE), steps)
    both.reference.pool.data.fill_(torch.nan)
    lengths = (3, 15)
    blocks = shuffled_blocks(30, [10] * len(lengths))
    sequences = [Driven(tokens(n, n), b) for n, b in zip(lengths, blocks, strict=True)]
    drive(both, sequences, outputs=3, chunk_tokens=8)  # type: ignore[arg-type]
    expected, found = torch.cat(both.expected), torch.cat(both.found)
    assert len(found) == 6
    truncates = model.device.type == "cpu" and model.dtype == torch.bfloat16
    tolerance = TRUNCATED if truncates else TOLERANCE[model.dtype]
    assert ((found - expected).norm(dim=-1) < tolerance * expected.norm(dim=-1)).all()
    written = [pool.data.isfinite().all(-1).all(-1) for pool in (both.reference.pool, steps.pool)]
    assert torch.equal(*written)


class _Both:
    """Runs every step on both backends; the sequences follow the reference."""

    def __init__(self, reference: TorchBackend, steps: Steps) -> None:
        self.reference, self.steps, self.pool = reference, steps, reference.pool
        self.expected: list[Tensor] = []
        self.found: list[Tensor] = []

    def logits(self, chunks: tuple[SequenceChunk, ...]) -> Tensor:
        self.expected.append(self.reference.logits(chunks))
        self.found.append(self.steps.logits(chunks))
        return self.expected[-1]


class TorchAttention:
    """`AttentionKernels` in plain torch, one sequence after another, in float32."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def begin(self, step: StepTensors) -> None:
        """Nothing to prepare."""

    def prefill(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: PrefillTensors) -> None:
        """See `AttentionKernels.prefill`."""
        starts, contexts = tensors.query_starts.tolist(), tensors.contexts.tolist()
        for i, context in enumerate(contexts):
            rows = slice(starts[i], starts[i + 1])
            length = context + rows.stop - rows.start
            out[rows] = attended(q[rows], pool[:, layer], tensors.tables[i], length, self._config.windows[layer])

    def decode(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: DecodeTensors) -> None:
        """See `AttentionKernels.decode`."""
        out.zero_()
        for i, length in enumerate(tensors.lengths.tolist()):
            if length:
                table, window = tensors.tables[i], self._config.windows[layer]
                out[i] = attended(q[i : i + 1], pool[:, layer], table, length, window)[0]


def attended(q: Tensor, pages: Tensor, table: Tensor, length: int, window: int | None) -> Tensor:
    """q [n, heads, dim] of the last n of `length` tokens; pages [block, 2, slot, kv_head, dim] -> [n, heads * dim]."""
    used = table[: -(-length // pages.shape[2])].long()
    k, v = pages[used].transpose(1, 2).flatten(0, 1)[:length].float().unbind(1)
    positions = torch.arange(length, device=q.device)
    own = positions[length - len(q) :, None]
    seen = positions <= own
    if window is not None:
        seen &= positions > own - window
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q.float(), k, v))
    result = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
    return result[0].transpose(0, 1).flatten(1).to(q.dtype)
