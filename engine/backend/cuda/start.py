"""Starts the engine on a card: weights, buffers, a measured trial of the largest step, KV pool, CUDA graphs."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from engine.backend.cuda.attention import AttentionKernels
from engine.backend.cuda.attention_choice import AttentionNeeds, make_attention
from engine.backend.cuda.backend import RING, CudaBackend, Forward
from engine.backend.cuda.build import table_widths
from engine.backend.cuda.decoder import CudaDecoder, DecoderBuffers
from engine.backend.cuda.device import CudaDevice, Device, is_out_of_memory
from engine.backend.cuda.graphs import decode_shapes, inputs_bytes
from engine.backend.cuda.kernels.prefill import tiling_for
from engine.backend.cuda.memory import (
    GRAPH_BYTES,
    CudaStartError,
    DeviceMemory,
    Want,
    kv_pool_blocks,
    shares,
    weight_bytes,
)
from engine.backend.cuda.trial import largest_step, warm_up_steps
from engine.backend.torch_kv import KvPool
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, load_decoder

log = logging.getLogger(__name__)
_LEAST_CAPABILITY = (8, 0)
_WEIGHTS = "name a --device cuda:N with more free memory, --dtype bfloat16, or a smaller --model"


class StartSettings(Protocol):
    """The fields of `engine.startup.settings.EngineSettings` that this module reads; that class explains them."""

    @property
    def model(self) -> Path: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def cuda_graphs(self) -> bool: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_step_tokens(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def kv_pool_tokens(self) -> int: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def kv_memory_share(self) -> float: ...


def start_cuda(settings: StartSettings) -> tuple[CudaBackend, int]:
    """Return the backend on `settings.device` and the number of blocks in its pool. This call blocks.

    Raises ModelError, CudaStartError.
    """
    config = ModelConfig.from_path(settings.model)
    torch_device = _cuda_device(settings.device)
    _require_compiler()
    device = CudaDevice(torch_device)
    memory = DeviceMemory(str(torch_device), device.total_bytes(), device.free_bytes())
    starter = Starter(settings, config, device, memory)
    model = starter.load()
    torch.cuda.synchronize(torch_device)
    return replace(starter, config=model.config).finish(model, torch.cuda.get_device_capability(torch_device))


def _require_compiler() -> None:
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise CudaStartError("--device cuda needs a C compiler, for Triton: install gcc, or name another in CC")


def _cuda_device(name: str) -> torch.device:
    """Return the card if this engine can use it; "cuda" is the first. Raises CudaStartError."""
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        seen = f"cuda:0 to cuda:{count - 1}" if count else "none; is the driver there, and is torch a build with CUDA?"
        raise CudaStartError(f"--device {name} does not exist; torch sees {seen}")
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < _LEAST_CAPABILITY:
        raise CudaStartError(
            f"--device {name} has compute capability {major}.{minor}; this engine needs 8.0 (Ampere) or later"
        )
    return torch.device("cuda", index)


@dataclass(frozen=True, slots=True)
class Starter:
    """Takes memory in the right order, on any `Device`."""

    settings: StartSettings
    config: ModelConfig
    device: Device
    memory: DeviceMemory

    def load(self) -> Decoder:
        """Load the model, after checking that the planned parts fit. Raises ModelError, CudaStartError."""
        known = self.settings.dtype if self.settings.dtype != "auto" else self.config.dtype
        wants = [] if known is None else self._wants(getattr(torch, known))
        self.memory.check(wants)
        log.info("%s: loading %s", self.memory.name, self.settings.model)
        try:
            return load_decoder(self.settings.model, dtype=self.settings.dtype, device=str(self.device.torch))
        except torch.OutOfMemoryError:
            wants = wants or [Want("the weights, at least", self.memory.free_bytes, _WEIGHTS)]
            raise self.memory.too_small(wants, wants[0]) from None

    def finish(self, model: Decoder, capability: tuple[int, int]) -> tuple[CudaBackend, int]:
        """Return the backend of a loaded model and the number of blocks in its pool. Raises CudaStartError."""
        wants = self._wants(model.dtype)
        try:
            with self.device.use():
                forward = self._forward(model, capability)
                transient = self._measured(model, forward)
        except torch.OutOfMemoryError:  # the memory left by the weights was not enough
            left = self.memory.free_bytes - wants[0].bytes
            wants[1] = replace(wants[1], part="activations (at least)", bytes=max(wants[1].bytes, left))
            raise self.memory.too_small(wants, wants[1]) from None
        taken = self.memory.free_bytes - self.device.free_bytes()
        wants[1] = replace(wants[1], bytes=max(0, taken - wants[0].bytes) + transient)
        blocks = self._blocks(wants[:3], model.dtype)
        wants[3:] = [self._pool(blocks, model.dtype)]
        try:
            backend = self._backend(model, forward, blocks, min(self._max_blocks(), blocks))
            for plan in warm_up_steps(*self._bounds(blocks)):
                backend.warm_up(plan)
            if self.settings.cuda_graphs:
                backend.capture_graphs(self.settings.max_running, wants[2].bytes)
            # Capturing empties torch's cache. Here it is filled again, so a shortage shows now and not while serving.
            # Each buffer of the ring grows to the largest step's size now, because locking pages takes milliseconds.
            for _ in range(RING):
                backend.warm_up(largest_step(*self._bounds(blocks)))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self.memory.too_small(wants, wants[3]) from None
        log.info("%s: %s (%d tokens)", self.memory.name, shares(wants), blocks * self.settings.block_size)
        return backend, blocks

    def _wants(self, dtype: torch.dtype) -> list[Want]:
        """Return what weights, activations and graphs need by their shapes, and the KV pool if its size is set."""
        settings = self.settings
        buffers = DecoderBuffers.make(
            self.config,
            tokens=settings.max_step_tokens,
            rows=settings.max_running,
            dtype=dtype,
            device=torch.device("meta"),
        )
        remedy = f"lower --max-step-tokens ({settings.max_step_tokens}) or --max-running ({settings.max_running})"
        weights = Want("weights", weight_bytes(self.config, dtype), _WEIGHTS)
        asked = self._asked_blocks(dtype)
        pool = [self._pool(asked, dtype)] if asked else []
        return [weights, Want("activations", buffers.nbytes, remedy), self._graphs(), *pool]

    def _graphs(self) -> Want:
        settings = self.settings
        widths = table_widths(self._max_blocks(), settings.block_size)
        count = len(decode_shapes(settings.max_running, widths)) if settings.cuda_graphs else 0
        size = count * GRAPH_BYTES + inputs_bytes(settings.max_running, widths) if count else 0
        return Want("CUDA graphs", size, f"lower --max-running ({settings.max_running}), or --no-cuda-graphs")

    def _bounds(self, blocks: int | None = None) -> tuple[int, int, int, int]:
        """Return the most tokens and sequences of a step, the most tokens of a sequence (in a pool of `blocks`), and
        the tokens of a block."""
        settings, longest = self.settings, self._max_tokens()
        longest = longest if blocks is None else min(longest, blocks * settings.block_size)
        return settings.max_step_tokens, settings.max_running, longest, settings.block_size

    def _max_tokens(self) -> int:
        """Return the tokens of the longest sequence, ignoring the size of the pool."""
        return min(self.settings.max_model_len or self.config.max_position, self.config.max_position)

    def _max_blocks(self) -> int:
        return -(-self._max_tokens() // self.settings.block_size)

    def _forward(self, model: Decoder, capability: tuple[int, int]) -> Forward:
        settings = self.settings
        decoder = CudaDecoder(model)
        needs = AttentionNeeds(
            config=self.config,
            dtype=model.dtype,
            device=model.device,
            capability=capability,
            block_size=settings.block_size,
            rows=settings.max_running,
            tokens=self._max_blocks() * settings.block_size,
        )
        try:
            attention: AttentionKernels = make_attention(settings.attention, needs)
        except ValueError as error:
            raise CudaStartError(f"--attention {settings.attention}: {error}") from None
        buffers = decoder.buffers(settings.max_step_tokens, settings.max_running)
        return lambda step, pool: decoder.forward(step, pool, attention, buffers)

    def _measured(self, model: Decoder, forward: Forward) -> int:
        """Return the bytes that the largest step takes temporarily, above the memory that stays allocated."""
        trial = self._backend(model, forward, 1, self._max_blocks())
        log.info("%s: trying the largest step, which compiles kernels the first time", self.memory.name)
        plan = largest_step(*self._bounds())
        trial.warm_up(plan)  # compiles kernels, and libraries take their lasting memory
        peak = self.device.peak_bytes(lambda: trial.warm_up(plan))
        trial.shutdown()  # the libraries' memory for its thread goes to the next thread
        return peak

    def _backend(self, model: Decoder, forward: Forward, blocks: int, longest: int) -> CudaBackend:
        """Return a backend over a pool of `blocks`, for sequences of up to `longest` blocks."""
        settings = self.settings
        with torch.inference_mode(False):  # tiers write into the pool outside of inference mode
            pool = KvPool(self.config, blocks, settings.block_size, dtype=model.dtype, device=model.device)
        tiling = tiling_for(self.config.heads, self.config.kv_heads, model.device)
        return CudaBackend(self.device, model, forward, pool, tiling=tiling, max_blocks=longest)

    def _asked_blocks(self, dtype: torch.dtype) -> int:
        """Return the blocks that the settings ask for, 0 if none. Raises CudaStartError if the bytes hold no block."""
        settings, block = self.settings, self._block_bytes(dtype)
        if 0 < settings.kv_cache_bytes < block and not settings.kv_pool_tokens:
            raise CudaStartError(f"--kv-cache-bytes {settings.kv_cache_bytes} holds no block; one takes {block} bytes")
        return settings.kv_pool_tokens // settings.block_size or settings.kv_cache_bytes // block

    def _blocks(self, wants: list[Want], dtype: torch.dtype) -> int:
        """Return the blocks of the pool: as set, or by its share of the memory left. Raises CudaStartError."""
        left = self.memory.check(wants)
        asked = self._asked_blocks(dtype)
        blocks = asked or kv_pool_blocks(left, self._block_bytes(dtype), share=self.settings.kv_memory_share)
        if not blocks:
            raise self.memory.too_small([*wants, self._pool(1, dtype)], wants[1])
        self.memory.check([*wants, self._pool(blocks, dtype)])
        return blocks

    def _pool(self, blocks: int, dtype: torch.dtype) -> Want:
        flag = "--kv-pool-tokens" if self.settings.kv_pool_tokens else "--kv-cache-bytes"
        if not (self.settings.kv_pool_tokens or self.settings.kv_cache_bytes):
            flag = f"--kv-memory-share ({self.settings.kv_memory_share:g})"
        return Want(f"KV pool of {blocks} blocks", blocks * self._block_bytes(dtype), f"lower {flag}")

    def _block_bytes(self, dtype: torch.dtype) -> int:
        return self.config.kv_bytes_per_token(dtype.itemsize) * self.settings.block_size
