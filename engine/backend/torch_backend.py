"""A `Backend` that runs a model with torch: the reference on the CPU, and plain torch on a CUDA device."""

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
from engine.backend.torch_kv import KvPool, PagedAttention
from engine.model.decoder import Decoder
from engine.sched.plan import SampledToken, SequenceChunk, StepPlan, StepResult


class TorchBackend:
    """Runs steps on one worker thread of its own, so the event loop is never blocked.

    To make one (the first line takes seconds: call it off the event loop, e.g. with `asyncio.to_thread`):

        model = load_decoder(path, dtype="auto", device="cpu")                      # engine.model.decoder
        blocks = blocks_for_budget(model.config, kv_bytes, block_size=16, dtype=model.dtype)  # engine.backend.torch_kv
        backend = TorchBackend(model, block_count=blocks, block_size=16)

    It runs where the model is. `model.config` has `max_position`, `vocab_size` and `eos_token_ids` for the server.
    Blocks are numbered 0 .. block_count - 1. `threads` bounds torch's threads within an operation, for the whole
    process; None leaves torch's choice, one per core.
    """

    max_in_flight = 1

    def __init__(self, model: Decoder, *, block_count: int, block_size: int, threads: int | None = None) -> None:
        if block_count < 1 or block_size < 1:
            raise ValueError(f"block_count ({block_count}) and block_size ({block_size}) must be at least 1")
        self.model = model
        self.pool = KvPool(model.config, block_count, block_size, dtype=model.dtype, device=model.device)
        self._sparse = supports_sparse_decode(model.dtype, model.device)
        set_up = partial(torch.set_num_threads, threads) if threads else None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-step", initializer=set_up)

    async def run(self, plan: StepPlan) -> StepResult:
        """See `Backend.run`. Raises RuntimeError after `close`."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._step, plan)

    async def close(self) -> None:
        """See `Backend.close`. Closing twice is harmless."""
        await asyncio.to_thread(self._worker.shutdown)

    @torch.inference_mode()
    def logits(self, chunks: tuple[SequenceChunk, ...]) -> Tensor:
        """Compute the chunks: float32 [R, vocab_size] of the last token of each chunk that samples, in order."""
        device = self.model.device
        self.pool.copy_sources(chunks)
        # From lists, in one go: a torch operation per chunk takes longer than all of these.
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=device)
        positions = [position for c in chunks for position in range(c.start, c.start + len(c.tokens))]
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        rows = None if len(last) == len(tokens) else torch.tensor(last, dtype=torch.int64, device=device)
        attention = PagedAttention(self.pool, self.model.config, chunks, sparse=self._sparse)
        hidden = self.model.hidden(tokens, torch.tensor(positions, device=device), attention, rows)
        return self.model.logits(hidden).float()

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
