"""A `Backend` that runs a model with torch: on the CPU, and as a reference in plain torch on a CUDA device."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from engine.backend.sampler import sample
from engine.backend.torch_decode import supports_sparse_decode
from engine.backend.torch_exact import ExactAttention, TileShape
from engine.backend.torch_kv import KvPool, PagedAttention
from engine.model.decoder import Decoder
from engine.model.exact import ExactDecoder
from engine.sched.plan import SampledToken, SequenceChunk, StepPlan, StepResult


class TorchBackend:
    """Runs steps on its own worker thread, so the event loop is never blocked.

    To make a backend (the first line takes seconds: call it off the event loop, e.g. with `asyncio.to_thread`):

        model = load_decoder(path, dtype="auto", device="cpu")                      # engine.model.decoder
        blocks = blocks_for_budget(model.config, kv_bytes, block_size=16, dtype=model.dtype)  # engine.backend.torch_kv
        backend = TorchBackend(model, block_count=blocks, block_size=16)

    It runs on the model's device. `model.config` has `max_position`, `vocab_size` and `eos_token_ids` for the server.
    Blocks are numbered 0 .. block_count - 1. `threads` bounds torch's threads within an operation, for the whole
    process; None leaves torch's choice, one per core.

    `exact`: a request's logits have the same bits with any cache, any cut of its prompt into chunks, and in any batch.
    It works only on the CPU. Raises NotExact if this machine's libraries make it impossible.
    """

    max_in_flight = 1

    def __init__(
        self, model: Decoder, *, block_count: int, block_size: int, threads: int | None = None, exact: bool = False
    ) -> None:
        if block_count < 1 or block_size < 1:
            raise ValueError(f"block_count ({block_count}) and block_size ({block_size}) must be at least 1")
        if exact and model.device.type != "cpu":
            raise ValueError(f"exact computing works only on cpu, not on {model.device}")
        self.pool = KvPool(model.config, block_count, block_size, dtype=model.dtype, device=model.device)
        self._sparse = supports_sparse_decode(model.dtype, model.device)
        set_up = partial(torch.set_num_threads, threads) if threads else None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-step", initializer=set_up)
        self.model = model
        self._tiles: TileShape | None = None
        if exact:
            try:
                self.model, self._tiles = self._worker.submit(_exact, model).result()
            except BaseException:
                self._worker.shutdown()
                raise

    async def run(self, plan: StepPlan) -> StepResult:
        """See `Backend.run`. Raises RuntimeError after `close`."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._step, plan)

    async def close(self) -> None:
        """See `Backend.close`. Closing twice is harmless."""
        await asyncio.to_thread(self._worker.shutdown)

    @torch.inference_mode()
    def logits(self, chunks: tuple[SequenceChunk, ...]) -> Tensor:
        """Compute the chunks. Return float32 [R, vocab_size] for the last token of each sampling chunk, in order."""
        device = self.model.device
        self.pool.copy_sources(chunks)
        if self._tiles is not None and isinstance(self.model, ExactDecoder):
            return self._exact_logits(chunks, self.model, self._tiles)
        # Made from lists: one torch operation per chunk would take longer than all of this.
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=device)
        positions = [position for c in chunks for position in range(c.start, c.start + len(c.tokens))]
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        rows = None if len(last) == len(tokens) else torch.tensor(last, dtype=torch.int64, device=device)
        attention = PagedAttention(self.pool, self.model.config, chunks, sparse=self._sparse)
        hidden = self.model.hidden(tokens, torch.tensor(positions, device=device), attention, rows)
        return self.model.logits(hidden).float()

    def _exact_logits(self, chunks: tuple[SequenceChunk, ...], model: ExactDecoder, tiles: TileShape) -> Tensor:
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [position for c in chunks for position in range(c.start, c.start + len(c.tokens))]
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        sampled, multiple = len(last), model.row_multiple
        for numbers in (tokens, positions):
            numbers += [0] * (-len(numbers) % multiple)
        rows = torch.tensor(last + last[:1] * (-sampled % multiple), dtype=torch.int64)
        attention = ExactAttention(self.pool, model.config, chunks, tiles)
        hidden = model.hidden(torch.tensor(tokens), torch.tensor(positions), attention, rows)
        return model.logits(hidden)[:sampled].float()

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        start_s = time.perf_counter()
        logits = self.logits(plan.chunks)
        requests = [chunk.request for chunk in plan.chunks if chunk.samples]
        sampled: dict[int, SampledToken] = {}
        if requests:
            tokens = sample(logits, requests)
            sampled = {request.id: token for request, token in zip(requests, tokens, strict=True)}
        elif self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return StepResult(sampled, time.perf_counter() - start_s)


@torch.inference_mode()
def _exact(model: Decoder) -> tuple[ExactDecoder, TileShape]:
    """Return the exact model for the torch threads of the calling thread."""
    return ExactDecoder(model), TileShape.measured(model.config)
