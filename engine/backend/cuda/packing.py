"""One copy to the device per step: packs arrays into page-locked memory, and views them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backend.cuda.device import Device, Event

ALIGN_BYTES = 16
"""Triton compiles a separate kernel for pointers that are not divisible by this."""
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """Arrays on the device."""

    data: Tensor
    """All arrays packed, uint8."""
    views: tuple[Tensor, ...]
    """A view of each array, in order."""


def packed_bytes(arrays: Sequence[Array]) -> int:
    """Return the bytes of these arrays when packed."""
    return sum(_aligned(array.nbytes) for array in arrays)


def views_of(data: Tensor, like: Sequence[Array]) -> tuple[Tensor, ...]:
    """Return the arrays packed in data [uint8], with the shapes and types of `like`."""
    views, start = [], 0
    for array in like:
        views.append(data[start : start + array.nbytes].view(_TORCH[array.dtype]).view(array.shape))
        start += _aligned(array.nbytes)
    return tuple(views)


class Uploads:
    """A ring of page-locked buffers. A buffer is written again only when the device has read it."""

    def __init__(self, device: Device, *, buffers: int, first_bytes: int = 1 << 20) -> None:
        self._device = device
        self._buffers = [device.pinned(first_bytes) for _ in range(buffers)]
        self._read: list[Event | None] = [None] * buffers
        self._next = 0

    def send(self, arrays: Sequence[Array]) -> Packed:
        """Launch the copy of these arrays, and return at once."""
        index, size = self._next, packed_bytes(arrays)
        self._next = (index + 1) % len(self._buffers)
        if (read := self._read[index]) is not None:
            read.wait()
        if len(self._buffers[index]) < size:
            self._buffers[index] = self._device.pinned(1 << (size - 1).bit_length())
        host = self._buffers[index]
        _write(host.numpy(), arrays)
        data = torch.empty(size, dtype=torch.uint8, device=self._device.torch)
        data.copy_(host[:size], non_blocking=True)
        self._read[index] = self._device.event()
        return Packed(data, views_of(data, arrays))


class Downloads:
    """A ring of page-locked buffers for results. A result lasts until its buffer's next turn."""

    def __init__(self, device: Device, *, buffers: int, first_values: int = 1024) -> None:
        self._device = device
        self._buffers = [self._pinned(first_values) for _ in range(buffers)]
        self._next = 0

    def fetch(self, values: Tensor) -> NDArray[np.int32]:
        """Launch the copy of values [n] int32. The returned array holds them when a later event has passed."""
        index, size = self._next, len(values)
        self._next = (index + 1) % len(self._buffers)
        if len(self._buffers[index]) < size:
            self._buffers[index] = self._pinned(1 << (size - 1).bit_length())
        host = self._buffers[index][:size]
        host.copy_(values, non_blocking=True)
        landed: NDArray[np.int32] = host.numpy()
        return landed

    def _pinned(self, values: int) -> Tensor:
        return self._device.pinned(4 * values).view(torch.int32)


def _write(buffer: Array, arrays: Sequence[Array]) -> None:
    start = 0
    for array in arrays:
        buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        start += _aligned(array.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
