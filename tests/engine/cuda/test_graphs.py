"""CUDA graphs on a device that replays on the CPU: their sizes, bounds, and fixed addresses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.backend.cuda.build import DecodeShape, StepBuilder
from engine.backend.cuda.graphs import Graphs, decode_batches, decode_shapes, inputs_bytes
from engine.backend.cuda.kernels.step import StepTensors
from engine.backend.cuda.kernels.tiling import Tiling
from engine.backend.cuda.packing import Uploads
from engine.sched.plan import SequenceChunk
from engine.sched.request import Request
from tests.engine.cuda.devices import CpuDevice

WIDTHS = (4, 16)
LOGITS = torch.zeros(16, 3)


def forward(step: StepTensors) -> Tensor:
    """Return logits that depend on every input: token and position, slot and first block, length."""
    assert step.decode is not None
    assert step.prefill is None
    assert step.rows is None
    out = LOGITS[: len(step.tokens)]
    out[:, 0] = step.tokens + 1000 * step.positions
    out[:, 1] = step.slots + 1000 * step.decode.tables.sum(dim=1)
    out[:, 2] = step.decode.lengths
    return out


@given(st.integers(1, 4096))
def test_batch_sizes_leave_little_padding(largest: int) -> None:
    sizes = decode_batches(largest)
    assert sizes[-1] == largest
    assert sizes[0] == 1
    assert list(sizes) == sorted(set(sizes))
    assert all(b <= 2 * a or a >= 16 for a, b in pairwise(sizes))
    assert all(b - a <= max(16, a // 2) for a, b in pairwise(sizes) if a >= 16)


def test_the_sizes_of_a_usual_engine() -> None:
    assert decode_batches(256) == (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
    assert decode_shapes(4, (64, 256)) == [DecodeShape(b, w) for w in (64, 256) for b in (4, 2, 1)]


def chunks(count: int, start: int) -> list[SequenceChunk]:
    made = []
    for i in range(1, count + 1):
        request = Request(i, [0] * (start + i), 9)
        blocks = tuple(range(i, i + (start + i) // 4 + 1))
        made.append(SequenceChunk(request, start + i, (10 + i,), blocks, True, True))
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("start", [2, 30])
def test_a_replay_is_the_step(count: int, start: int) -> None:
    """The step is padded to a captured size, after other steps left other inputs at the same addresses."""
    device = CpuDevice()
    graphs = Graphs(device, forward, 8, WIDTHS)
    graphs.capture(1 << 20)
    builder, uploads = StepBuilder(4, Tiling(1, kv_heads=1, processors=1), WIDTHS), Uploads(device, buffers=3)
    for step in (chunks(8, 40), chunks(count, start)):
        shape = graphs.find(len(step), max(len(c.blocks) for c in step))
        assert shape is not None
        assert shape.batch >= len(step)
        host = builder.build(step, {}, shape)
        padded = graphs.replay(shape, uploads.send(host.arrays).data).clone()
    plain = builder.build(step, {})
    expected = forward(plain.on_device(uploads.send(plain.arrays).views))
    assert torch.equal(padded[:count], expected)
    assert padded[count:, 2].eq(0).all()
    assert padded[count:, 1].eq(-1).all(), "rows of padding write nowhere and have no blocks"


def test_capturing_runs_each_size_once_before_and_once_as_a_graph() -> None:
    """Kernels compile at their first launch, which no graph may contain, and a graph's first replay uploads it. No row
    writes anything meanwhile."""
    calls: list[tuple[int, int, bool]] = []

    def watched(step: StepTensors) -> Tensor:
        assert step.decode is not None
        calls.append((len(step.tokens), step.decode.tables.shape[1], bool(step.slots.eq(-1).all())))
        assert not step.decode.lengths.any()
        assert not step.tokens.any()
        return forward(step)

    device = CpuDevice()
    Graphs(device, watched, 2, WIDTHS).capture(1 << 20)
    assert calls == [call for size in ((2, 4), (1, 4), (2, 16), (1, 16)) for call in [(*size, True)] * 3]
    assert [graph.replays for graph in device.graphs] == [1] * 4
    assert device.synchronized == 8


def test_what_is_not_captured_is_not_found() -> None:
    graphs = Graphs(CpuDevice(), forward, 8, WIDTHS)
    assert graphs.find(1, 1) is None
    graphs.capture(1 << 20)
    assert graphs.captured == 8
    assert graphs.find(3, 5) == DecodeShape(4, 16)
    assert graphs.find(8, 16) == DecodeShape(8, 16)
    assert graphs.find(9, 1) is None
    assert graphs.find(1, 17) is None


def test_capturing_stops_at_its_share_of_memory() -> None:
    device, said = CpuDevice(free=100 << 20, graph_bytes=3 << 20), list[str]()
    graphs = Graphs(device, forward, 8, WIDTHS)
    graphs.capture(8 << 20, said.append)
    assert graphs.captured == 3
    assert said == [
        "CUDA graphs took 9 MiB, more than planned: 3 of 8 are captured; longer sequences decode without them"
    ]
    # Shapes with narrow tables and large batches are captured first.
    assert graphs.find(8, 4) == DecodeShape(8, 4)
    assert graphs.find(1, 4) is None
    assert graphs.find(8, 16) is None


def fail_in_the_wake(error: Exception) -> None:
    """Raise like torch at the end of a capture in which `error` was raised."""
    try:
        raise error
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def raise_it(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("fail", [raise_it, fail_in_the_wake])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_capturing_ends_when_memory_runs_out(error: Exception, fail: Callable[[Exception], None]) -> None:
    def failing(step: StepTensors) -> Tensor:
        if len(step.tokens) == 2:
            fail(error)
        return forward(step)

    said: list[str] = []
    graphs = Graphs(CpuDevice(), failing, 8, WIDTHS)
    graphs.capture(1 << 20, said.append)
    assert graphs.captured == 2
    assert said == ["no memory for more CUDA graphs: 2 of 8 are captured"]


def test_any_other_error_is_not_taken_for_lack_of_memory() -> None:
    def failing(step: StepTensors) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        Graphs(CpuDevice(), failing, 8, WIDTHS).capture(1 << 20)


def test_the_inputs_are_as_large_as_planned() -> None:
    # Two int64 arrays and two int32 arrays of 8 rows each, aligned to 16, and the tables.
    assert inputs_bytes(8, WIDTHS) == 2 * 64 + 2 * 32 + 8 * 16 * 4
