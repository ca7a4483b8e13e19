"""Divides a device's memory, and names what to change if it is too little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.weights import tensor_shapes

GRAPH_BYTES = 8 << 20
"""Bytes set aside per CUDA graph, which the driver needs for some 300 launches. This is an estimate, not measured. The
real use is logged at start, and capturing stops at the estimate."""
_GIB = 1 << 30


class CudaStartError(Exception):
    """The engine cannot start on this device with these settings; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Want:
    """One part of the memory."""

    part: str
    bytes: int
    remedy: str
    """The flag that makes this part smaller."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory before the engine took any of it."""

    name: str
    total_bytes: int
    free_bytes: int

    def check(self, wants: Sequence[Want]) -> int:
        """Return the bytes left free. Raises CudaStartError with the remedy of the first part that does not fit."""
        left = self.free_bytes
        for want in wants:
            left -= want.bytes
            if left < 0:
                raise self.too_small(wants, want)
        return left

    def too_small(self, wants: Sequence[Want], culprit: Want) -> CudaStartError:
        """Return the error that lists each part's size, and the way to make `culprit` smaller."""
        others = self.total_bytes - self.free_bytes
        missing = sum(want.bytes for want in wants) - self.free_bytes
        short = f", {_gib(missing)} more than that" if missing > 0 else ""
        return CudaStartError(
            f"{self.name} has too little memory: {_gib(self.free_bytes)} of {_gib(self.total_bytes)} are free "
            f"({_gib(others)} are in use by others); wanted: {shares(wants)}{short}. "
            f"No room is left for {culprit.part}: {culprit.remedy}"
        )


def shares(wants: Sequence[Want]) -> str:
    """Return a readable list of each part and its size."""
    return ", ".join(f"{want.part} {_gib(want.bytes)}" for want in wants)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values()) * dtype.itemsize


def kv_pool_blocks(left_bytes: int, block_bytes: int, *, share: float) -> int:
    """Return the blocks of a pool that takes `share` of the memory left by weights, activations and graphs."""
    return int(left_bytes * share) // block_bytes


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB // 10 else f"{size / (1 << 20):.1f} MiB"
