"""Paged prefill equals attention in plain float32, and the bits of a chunk do not depend on other chunks."""

from __future__ import annotations

import mmap
import tempfile
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backend.cuda.kernels import prefill as kernel
from engine.backend.cuda.kernels import tiling
from engine.backend.cuda.kernels.attend import INTERPRETED, Launch
from engine.backend.cuda.kernels.prefill import paged_prefill, prefill_scratch, query_tile, tiling_for
from engine.backend.cuda.kernels.tiling import Tiling
from tests.engine.cuda.cutting import prefill_tensors
from tests.engine.cuda.kernels.attention_cases import TOLERANCE, UNSHRUNK, Paged, Shape, expected, sequence

windows = st.none() | st.integers(1, 90)
shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 8),
    dim=st.sampled_from([16, 40, 64, 80]),
    page=st.sampled_from([8, 16, 32, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=windows,
)

small = st.builds(
    Shape,
    kv_heads=st.just(1),
    group=st.integers(1, 4),
    page=st.sampled_from([8, 16]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=windows,
)


@st.composite
def parts_of(draw: st.DrawFn) -> tuple[int, int]:
    """Draw start and end of a chunk. It starts at 0, at a page's edge or anywhere; it may have a single token."""
    start = draw(st.sampled_from([0, 0, 16, 64, 65]) | st.integers(0, 150))
    return start, start + draw(st.sampled_from([1, 2, 63, 64]) | st.integers(1, 90))


@st.composite
def behind(draw: st.DrawFn) -> tuple[int, int]:
    """Draw start and end of a short chunk far from its sequence's start."""
    start = draw(st.integers(130, 200))
    return start, start + draw(st.sampled_from([1, 32, 33]) | st.integers(1, 50))


def close(shape: Shape, found: Tensor, exact: Tensor) -> bool:
    return bool((found.float() - exact).abs().max() <= TOLERANCE[shape.dtype])


@given(shape=shapes, parts=st.lists(parts_of(), min_size=1, max_size=3), padding=st.integers(0, 2))
@settings(max_examples=6, phases=UNSHRUNK)
def test_chunks_of_many_prompts_equal_float32(
    device: torch.device, shape: Shape, parts: list[tuple[int, int]], padding: int
) -> None:
    """Pages before the window, other layers, unwritten slots and padding rows are NaN."""
    chunks = [(sequence(shape, end, seed), start, end) for seed, (start, end) in enumerate(parts)]
    found = Paged(shape, device).prefill(chunks, padding=padding, forget=True)
    for out, (whole, start, end) in zip(found, chunks, strict=True):
        assert close(shape, out, expected(shape, whole, range(start, end)))


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_of_heads_shares_a_tile(device: torch.device, group: int) -> None:
    shape = Shape(kv_heads=2, group=group)
    assert query_tile(shape.heads, shape.kv_heads) == kernel.ROWS // group
    tokens = kernel.ROWS // group + 3
    whole = sequence(shape, tokens, 0)
    (found,) = Paged(shape, device).prefill([(whole, 0, tokens)])
    assert close(shape, found, expected(shape, whole, range(tokens)))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_dimension(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    shape = Shape(kv_heads=1, dim=dim, dtype=dtype)
    whole = sequence(shape, 70, 0)
    (found,) = Paged(shape, device).prefill([(whole, 0, 70)])
    assert close(shape, found, expected(shape, whole, range(70)))


@given(
    shape=small,
    cuts=st.sets(st.integers(1, 169), min_size=1, max_size=3),
)
@example(shape=Shape(), cuts={16, 128})
@settings(max_examples=5, phases=UNSHRUNK)
def test_a_prompts_bits_do_not_depend_on_where_it_is_cut(device: torch.device, shape: Shape, cuts: set[int]) -> None:
    """After the cached blocks a warm prompt gets the same bits as a cold run."""
    whole = sequence(shape, 170, 0)
    (cold,) = Paged(shape, device).prefill([(whole, 0, 170)])
    edges = [0, *sorted(cuts), 170]
    pieces = [
        Paged(shape, device, seed=end).prefill([(whole, start, end)], forget=True)[0] for start, end in pairwise(edges)
    ]
    assert torch.equal(torch.cat(pieces), cold)


@given(
    shape=small,
    parts=st.lists(parts_of(), min_size=2, max_size=3),
    padding=st.integers(0, 2),
)
@settings(max_examples=5, phases=UNSHRUNK)
def test_a_chunks_bits_do_not_depend_on_the_other_chunks(
    device: torch.device, shape: Shape, parts: list[tuple[int, int]], padding: int
) -> None:
    chunks = [(sequence(shape, end, seed), start, end) for seed, (start, end) in enumerate(parts)]
    together = Paged(shape, device).prefill(chunks, padding=padding)
    for out, chunk in zip(together, chunks, strict=True):
        (alone,) = Paged(shape, device, seed=1).prefill([chunk])
        assert torch.equal(out, alone)


@pytest.mark.parametrize("rows", [16, 64])
def test_slices_of_a_tile_are_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """With the settings for wide heads a program has fewer rows than a tile."""
    launch = Launch(rows=rows, tile=INTERPRETED.tile, warps=4, stages=1)
    monkeypatch.setattr(kernel, "INTERPRETED", launch)
    monkeypatch.setattr(kernel, "launch_for", lambda *_, **__: launch)
    shape = Shape(kv_heads=1, group=3)
    whole = sequence(shape, 90, 0)
    chunks = [(whole, 0, 6), (whole, 30, 90)]
    for out, (_, start, end) in zip(Paged(shape, device).prefill(chunks, padding=1), chunks, strict=True):
        assert close(shape, out, expected(shape, whole, range(start, end)))


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut keys into parts as soon as there are two tiles of keys. A card does so only for thousands of keys."""
    monkeypatch.setattr(tiling, "PART_KEYS", INTERPRETED.tile)
    monkeypatch.setattr(tiling, "OVERHEAD_KEYS", 1)
    monkeypatch.setattr(tiling, "SCRATCH_PROGRAMS", 1)  # 16 slots, so that some chunks take more than one launch


@pytest.mark.usefixtures("short_parts")
@given(shape=small, parts=st.lists(behind(), min_size=1, max_size=3), padding=st.integers(0, 2))
@example(shape=Shape(group=4), parts=[(70, 200), (130, 170)], padding=1)
@example(shape=Shape(group=4), parts=[(130, 170), (140, 180), (190, 192)], padding=0)
@settings(
    max_examples=4, phases=UNSHRUNK, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_short_chunks_behind_long_prefixes_equal_float32(
    device: torch.device, shape: Shape, parts: list[tuple[int, int]], padding: int
) -> None:
    """Some tiles are cut along the keys and others are not; each chunk has the same bits as alone."""
    chunks = [(sequence(shape, end, seed), start, end) for seed, (start, end) in enumerate(parts)]
    cut = Tiling(query_tile(shape.heads, shape.kv_heads), shape.kv_heads, processors=132)
    assert any(cut.parts(end - start, end) > 1 for start, end in parts)
    found = Paged(shape, device).prefill(chunks, padding=padding, forget=True, tiling=cut)
    for out, (whole, start, end) in zip(found, chunks, strict=True):
        assert close(shape, out, expected(shape, whole, range(start, end)))
    if len(chunks) > 1:
        (alone,) = Paged(shape, device, seed=1).prefill(chunks[-1:], tiling=cut)
        assert torch.equal(found[-1], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("chunk", [(8092, 8192), (7900, 8192), (0, 2048)])
def test_the_sizes_of_llama_8b(device: torch.device, chunk: tuple[int, int], window: int | None) -> None:
    """This runs only on a card, because the interpreter would take minutes."""
    if device.type == "cpu":
        pytest.skip("needs a CUDA device")
    shape = Shape(kv_heads=8, group=4, dim=128, dtype=torch.bfloat16, window=window)
    start, end = chunk
    whole = sequence(shape, end, 0)
    (found,) = Paged(shape, device).prefill([(whole, start, end)], forget=True)
    assert close(shape, found, expected(shape, whole, range(start, end)))


def test_a_window_wider_than_the_prompt_changes_no_bit(device: torch.device) -> None:
    """Without a window, fully visible tiles take a shorter path."""
    whole = sequence(Shape(), 150, 0)
    (plain,) = Paged(Shape(), device).prefill([(whole, 20, 150)])
    (windowed,) = Paged(Shape(window=151), device).prefill([(whole, 20, 150)])
    assert torch.equal(plain, windowed)


def test_blocks_beyond_what_32_bits_count(device: torch.device) -> None:
    """The pool has more than 2^31 elements. On the CPU it is a sparse file, in which only the used pages take room."""
    shape = Shape(kv_heads=8, dim=128, page=64, dtype=torch.float16)
    block = 2 * shape.page * shape.kv_heads * shape.dim
    blocks = 2**31 // block + 2
    if device.type == "cuda":
        flat = torch.empty(blocks * block, dtype=shape.dtype, device=device)
    else:
        with tempfile.TemporaryFile() as sparse:
            sparse.truncate(blocks * block * 2)
            flat = torch.frombuffer(mmap.mmap(sparse.fileno(), 0), dtype=shape.dtype)
    pool = flat.view(blocks, 1, 2, shape.page, shape.kv_heads, shape.dim)
    whole = sequence(shape, 5, 0)
    pool[-1, 0, 0, :5] = whole.k.to(device)
    pool[-1, 0, 1, :5] = whole.v.to(device)
    cut_for = tiling_for(shape.heads, shape.kv_heads, device)
    tables = torch.tensor([[blocks - 1]], dtype=torch.int32, device=device)
    tensors = prefill_tensors(cut_for, [(5, 0)], tables)
    scratch = prefill_scratch(cut_for, shape.dim, device)
    out = torch.full((5, shape.heads * shape.dim), float("nan"), dtype=shape.dtype, device=device)
    paged_prefill(whole.q.to(device), pool, 0, out, tensors, scratch, window=None, scale=shape.dim**-0.5)
    assert close(shape, out.cpu(), expected(shape, whole, range(5)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (129, 1), (2, 4)])
def test_heads_that_no_tile_takes_are_refused(heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} query heads over {kv_heads} KV heads"):
        query_tile(heads, kv_heads)
