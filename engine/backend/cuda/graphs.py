"""CUDA graphs of decode steps, one for each padded size, captured at start within a bound of memory.

A graph reads its inputs at fixed addresses: `Graphs` keeps them, and copies a step there before each replay.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.backend.cuda.build import DecodeShape
from engine.backend.cuda.device import Device, Graph, is_out_of_memory
from engine.backend.cuda.kernels.step import DecodeTensors, StepTensors
from engine.backend.cuda.packing import Array, packed_bytes, views_of

log = logging.getLogger(__name__)
Forward = Callable[[StepTensors], Tensor]
"""step -> float32 logits [R, vocab_size], in a buffer that the next call uses again."""
_SMALL = (1, 2, 4, 8, 16)
_REPORT_S = 5.0
"""Seconds between two lines of progress."""


def decode_batches(largest: int) -> tuple[int, ...]:
    """Return the padded batch sizes up to and including `largest`. Above 16 they grow by 16, the tile of matrix
    products, and later by more, so that beyond 64 at most a third is padding."""
    sizes = [size for size in _SMALL if size < largest]
    size = _SMALL[-1]
    while True:
        size += 16 if size < 64 else 32 if size < 256 else 64
        if size >= largest:
            return (*sizes, largest)
        sizes.append(size)


def decode_shapes(max_batch: int, widths: Sequence[int]) -> list[DecodeShape]:
    """Return all shapes to capture, most useful first: narrow tables before wide, large batches before small."""
    return [DecodeShape(batch, width) for width in widths for batch in reversed(decode_batches(max_batch))]


class Graphs:
    """Captured decode steps. Used by one thread, under `Device.use`."""

    def __init__(self, device: Device, forward: Forward, max_batch: int, widths: Sequence[int]) -> None:
        self._device = device
        self._forward = forward
        self._batches = decode_batches(max_batch)
        self._widths = tuple(widths)
        self._inputs = torch.zeros(inputs_bytes(max_batch, widths), dtype=torch.uint8, device=device.torch)
        self._captured: dict[DecodeShape, tuple[Graph, Tensor]] = {}
        """Shape -> graph, and the logits that the graph writes."""

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return len(self._captured)

    def capture(self, limit_bytes: int, say: Callable[[str], object] = log.info) -> None:
        """Capture shapes until they take more than `limit_bytes`. The other shapes run without a graph."""
        shapes = decode_shapes(self._batches[-1], self._widths)
        free, start_s = self._device.free_bytes(), time.monotonic()
        told_s = start_s
        for done, shape in enumerate(shapes):
            used = free - self._device.free_bytes()
            if used > limit_bytes:
                say(
                    f"CUDA graphs took {used >> 20} MiB, more than planned: {done} of {len(shapes)} are captured; "
                    "longer sequences decode without them"
                )
                return
            try:
                self._capture(shape)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                say(f"no memory for more CUDA graphs: {done} of {len(shapes)} are captured")
                return
            if time.monotonic() - told_s > _REPORT_S:
                told_s = time.monotonic()
                say(f"captured {done + 1} of {len(shapes)} CUDA graphs")
        used = free - self._device.free_bytes()
        say(f"captured {len(shapes)} CUDA graphs, {used >> 20} MiB, in {time.monotonic() - start_s:.1f} s")

    def find(self, batch: int, blocks: int) -> DecodeShape | None:
        """Return the smallest captured shape for `batch` decode tokens of sequences of up to `blocks` blocks."""
        i, j = bisect_left(self._batches, batch), bisect_left(self._widths, blocks)
        if i == len(self._batches) or j == len(self._widths):
            return None
        shape = DecodeShape(self._batches[i], self._widths[j])
        return shape if shape in self._captured else None

    def replay(self, shape: DecodeShape, packed: Tensor) -> Tensor:
        """Launch the captured step, and return its logits. `packed` [uint8] begins with the arrays of its inputs."""
        graph, logits = self._captured[shape]
        size = packed_bytes(_inputs(shape))
        self._inputs[:size].copy_(packed[:size])
        graph.replay()
        return logits

    def _capture(self, shape: DecodeShape) -> None:
        tokens, slots, positions, lengths, tables = views_of(self._inputs, _inputs(shape))
        self._inputs.zero_()
        slots.fill_(-1)
        step = StepTensors(tokens, positions, slots, None, DecodeTensors(tables, lengths), None)
        # Run once without capturing: the first launch compiles kernels and allocates, which a graph may not contain.
        logits = self._forward(step)
        self._device.synchronize()

        def work() -> None:
            nonlocal logits
            logits = self._forward(step)

        graph = self._device.capture(work)
        graph.replay()  # the first replay uploads the graph: a lack of memory shows now, while no request waits
        self._device.synchronize()
        self._captured[shape] = graph, logits


def inputs_bytes(max_batch: int, widths: Sequence[int]) -> int:
    """Return the bytes of the inputs of the largest graph."""
    return packed_bytes(_inputs(DecodeShape(max_batch, widths[-1])))


def _inputs(shape: DecodeShape) -> tuple[Array, ...]:
    """Return arrays like `HostStep.arrays` for a step of this shape. They take no memory."""
    batch = shape.batch
    int32, int64 = np.zeros((), dtype=np.int32), np.zeros((), dtype=np.int64)
    return (
        np.broadcast_to(int64, batch),
        np.broadcast_to(int64, batch),
        np.broadcast_to(int32, batch),
        np.broadcast_to(int32, batch),
        np.broadcast_to(int32, (batch, shape.width)),
    )
