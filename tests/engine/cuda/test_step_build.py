"""Chunks as arrays: every token has the slot, position and table of the plan, after any earlier steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.cuda.build import DecodeShape, HostStep, StepBuilder, table_widths
from engine.backend.cuda.kernels.decode import MAX_PARTS, PART_TOKENS
from engine.backend.cuda.kernels.step import StepTensors
from engine.backend.cuda.kernels.tiling import Tiling
from engine.backend.cuda.packing import ALIGN_BYTES, Downloads, Uploads, packed_bytes
from engine.sched.plan import PENDING, SequenceChunk
from engine.sched.request import Request
from tests.engine.cuda.devices import CpuDevice

SIZE, TILE, BLOCKS = 4, 3, 40
TILING = Tiling(TILE, kv_heads=1, processors=1)
WIDTHS = (2, 6, 10)


def on_cpu(step: HostStep) -> StepTensors:
    device = CpuDevice()
    return step.on_device(Uploads(device, buffers=1).send(step.arrays).views)


def chunk_of(request_id: int, start: int, count: int, blocks: list[int], *, decodes: bool, samples: bool) -> Any:
    prompt = list(range(100 * request_id, 100 * request_id + 40))
    tokens = tuple(prompt[start : start + count])
    return SequenceChunk(Request(request_id, prompt, 9), start, tokens, tuple(blocks), samples or decodes, decodes)


@st.composite
def steps(draw: Any) -> list[list[SequenceChunk]]:
    """Draw successive steps. A request may return in a later step with more blocks, other blocks, or fewer."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5, unique=True))
        chunks = []
        for i in ids:
            decodes = draw(st.booleans())
            start = draw(st.integers(0, 30))
            count = 1 if decodes else draw(st.integers(1, 40 - start))
            need = -(-(start + count) // SIZE)
            base = draw(st.sampled_from([0, 0, 0, 3]))
            blocks = [(7 * i + base + k) % BLOCKS for k in range(need)]
            chunks.append(chunk_of(i, start, count, blocks, decodes=decodes, samples=draw(st.booleans())))
        found.append(chunks)
    return found


@settings(max_examples=60)
@given(steps())
def test_arrays_say_what_the_plan_says(plans: list[list[SequenceChunk]]) -> None:
    builder = StepBuilder(SIZE, TILING, WIDTHS)
    for chunks in plans:
        host = builder.build(chunks, {})
        step = on_cpu(host)
        assert sorted(map(id, host.chunks)) == sorted(map(id, chunks))
        split = step.prefill.tokens if step.prefill else 0
        assert split == sum(len(c.tokens) for c in chunks if not c.decodes)
        row = 0
        for chunk in host.chunks:
            end = row + len(chunk.tokens)
            assert step.tokens[row:end].tolist() == list(chunk.tokens)
            at = list(range(chunk.start, chunk.start + len(chunk.tokens)))
            assert step.positions[row:end].tolist() == at
            assert step.slots[row:end].tolist() == [chunk.blocks[p // SIZE] * SIZE + p % SIZE for p in at]
            row = end
        assert len(step.tokens) == len(step.slots) == len(step.positions) == row
        wanted = list(range(row)) if step.rows is None else step.rows.tolist()
        ends = np.cumsum([len(c.tokens) for c in host.chunks]) - 1
        assert wanted == [int(end) for end, c in zip(ends, host.chunks, strict=True) if c.samples]
        assert host.sampling == tuple(c for c in host.chunks if c.samples)
        check_prefill(step, [c for c in host.chunks if not c.decodes])
        check_decode(step, [c for c in host.chunks if c.decodes])


def check_prefill(step: StepTensors, chunks: list[SequenceChunk]) -> None:
    if not chunks:
        assert step.prefill is None
        return
    found = step.prefill
    assert found is not None
    assert found.query_starts.tolist() == np.cumsum([0, *(len(c.tokens) for c in chunks)]).tolist()
    assert found.contexts.tolist() == [c.start for c in chunks]
    # Each token of each chunk is in exactly one tile.
    tiles = [(i, tile * TILE + k) for i, tile, *_ in found.tiles.tolist() for k in range(TILE)]
    assert [t for t in tiles if t[1] < len(chunks[t[0]].tokens)] == [
        (i, k) for i, c in enumerate(chunks) for k in range(len(c.tokens))
    ]
    assert len({i for i, *_ in found.tiles.tolist()}) == len(chunks)
    assert found.rounds == TILING.cut([(len(c.tokens), c.start) for c in chunks]).rounds
    check_tables(found.tables, chunks)


def check_decode(step: StepTensors, chunks: list[SequenceChunk]) -> None:
    if not chunks:
        assert step.decode is None
        return
    assert step.decode is not None
    assert step.decode.lengths.tolist() == [c.start + 1 for c in chunks]
    check_tables(step.decode.tables, chunks)


def check_tables(tables: torch.Tensor, chunks: list[SequenceChunk]) -> None:
    assert tables.shape[1] == next(w for w in WIDTHS if w >= max(len(c.blocks) for c in chunks))
    for table, chunk in zip(tables.tolist(), chunks, strict=True):
        assert table[: len(chunk.blocks)] == list(chunk.blocks)


def test_dtypes_are_those_that_kernels_read() -> None:
    prefill = chunk_of(1, 0, 5, [1, 2], decodes=False, samples=False)
    step = on_cpu(
        StepBuilder(SIZE, TILING, WIDTHS).build([chunk_of(2, 8, 1, [3, 4, 5], decodes=True, samples=True), prefill], {})
    )
    assert step.prefill is not None
    assert step.decode is not None
    assert step.rows is not None
    wide = {step.tokens.dtype, step.slots.dtype, step.rows.dtype}
    narrow = [
        step.positions,
        *(getattr(step.prefill, n) for n in ("tables", "query_starts", "contexts", "tiles", "merged")),
    ]
    assert wide == {torch.int64}
    assert {t.dtype for t in (*narrow, step.decode.tables, step.decode.lengths)} == {torch.int32}


def test_a_padded_step_has_empty_rows_behind_its_own() -> None:
    chunks = [chunk_of(i, 4 + i, 1, [i, i + 10], decodes=True, samples=True) for i in (1, 2, 3)]
    host = StepBuilder(SIZE, TILING, WIDTHS).build(chunks, {}, DecodeShape(8, 6))
    step = on_cpu(host)
    assert step.rows is None
    assert step.decode is not None
    assert step.decode.tables.shape == (8, 6)
    assert step.decode.lengths.tolist() == [6, 7, 8, 0, 0, 0, 0, 0]
    assert step.slots.tolist() == [45, 50, 55, -1, -1, -1, -1, -1]
    assert len(step.tokens) == len(step.positions) == 8
    assert len(host.sampling) == 3


def test_pending_tokens_name_the_choice_they_are() -> None:
    known = chunk_of(1, 5, 1, [1, 2], decodes=True, samples=True)
    request = Request(2, [1, 2, 3], 9)
    pending = SequenceChunk(request, 3, (PENDING,), (4,), True, True)
    builder = StepBuilder(SIZE, TILING, WIDTHS)
    host = builder.build([chunk_of(3, 0, 6, [5, 6], decodes=False, samples=True), known, pending], {9: 0, 2: 4})
    assert (host.pending_rows.tolist(), host.pending_choices.tolist()) == ([7], [4])
    assert on_cpu(host).tokens[7] == 0, "a valid token id until the device fills in the choice"
    with pytest.raises(ValueError, match="the last step chose no token for request 2"):
        builder.build([pending], {1: 0})


def test_tables_of_requests_that_left_are_forgotten() -> None:
    builder = StepBuilder(SIZE, TILING, WIDTHS)
    for i in range(50):
        builder.build([chunk_of(i, 0, 3, [1], decodes=False, samples=True)], {})
    assert list(builder._tables) == [49]


@given(st.integers(1, 10**5), st.sampled_from([16, 32, 64]))
def test_widths_are_few_and_hold_every_sequence(max_blocks: int, size: int) -> None:
    widths = table_widths(max_blocks, size)
    assert widths[-1] == max_blocks
    assert list(widths) == sorted(set(widths))
    assert len(widths) <= 10
    assert all(wide <= 4 * narrow for narrow, wide in pairwise(widths))
    assert all(wide <= 2 * narrow for narrow, wide in pairwise(widths) if narrow * size < PART_TOKENS * MAX_PARTS)


def test_a_buffer_is_written_again_only_when_it_was_read() -> None:
    """The first three steps are sent at once. The fourth waits for the first step's event."""
    device = CpuDevice()
    waited: list[int] = []

    class Events:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    made = iter(range(100))
    device.event = lambda: Events(next(made))  # type: ignore[method-assign,assignment,return-value]
    uploads = Uploads(device, buffers=3)
    for i in range(3):
        uploads.send([np.array([i])])
    assert waited == []
    uploads.send([np.array([3])])
    uploads.send([np.array([4])])
    assert waited == [0, 1]


def test_packed_arrays_are_aligned_and_buffers_grow() -> None:
    device = CpuDevice()
    uploads = Uploads(device, buffers=2, first_bytes=64)
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(3, dtype=np.int32),
        np.array([], dtype=np.float64),
        np.arange(20).reshape(4, 5),
        np.ones(1),
    ]
    for _ in range(3):
        packed = uploads.send(arrays)
        for view, array in zip(packed.views, arrays, strict=True):
            assert np.array_equal(view.numpy(), array)
            assert view.data_ptr() % ALIGN_BYTES == 0 or not array.size
        assert packed.data.nbytes == packed_bytes(arrays) == 16 + 160 + 16
    assert [len(memory) for memory in device.copies] == [64, 64, 256, 256]


def test_results_last_until_the_ring_comes_round() -> None:
    downloads = Downloads(CpuDevice(), buffers=3, first_values=2)
    values = [torch.arange(i, i + 4, dtype=torch.int32) for i in range(5)]
    fetched = [downloads.fetch(value) for value in values[:3]]
    assert [f.tolist() for f in fetched] == [v.tolist() for v in values[:3]]
    downloads.fetch(values[3])
    assert [f.tolist() for f in fetched[1:]] == [v.tolist() for v in values[1:3]]
