"""Paged decode equals attention in plain float32, and the bits of a row do not depend on other rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.cuda.kernels import attend
from engine.backend.cuda.kernels import decode as kernel
from engine.backend.cuda.kernels.attend import INTERPRETED
from engine.backend.cuda.kernels.decode import decode_scratch, part_count
from tests.engine.cuda.kernels.attention_cases import TOLERANCE, UNSHRUNK, Paged, Shape, Vectors, expected, sequence

PART = kernel.PART_TOKENS
lengths = st.sampled_from([1, 2, 8, 15, 16, 17, 63, 64, 65, PART - 1, PART, PART + 1]) | st.integers(1, 2 * PART + 9)
windows = st.none() | st.sampled_from([1, 64, PART]) | st.integers(1, 300)
shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 8),
    dim=st.sampled_from([16, 40, 64, 80]),
    page=st.sampled_from([8, 16, 32, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=windows,
)


def test_the_driver_is_asked_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([80, 90, 120])
    active = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=next(asked)))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    devices = [torch.device("cuda", index) for index in (97, 98, 99)]
    assert [attend.is_hopper(device) for device in devices] == [False, True, False]
    assert [attend.is_hopper(device) for device in devices] == [False, True, False]


def check(shape: Shape, found: torch.Tensor, rows: list[tuple[Vectors, int]]) -> None:
    """Check that rows equal float32 attention, and that a row of length 0 is zero."""
    for out, (whole, length) in zip(found, rows, strict=True):
        exact = expected(shape, whole, [length - 1])[0] if length else torch.zeros(len(out))
        assert (out.float() - exact).abs().max() <= TOLERANCE[shape.dtype], length


@given(shape=shapes, tokens=st.lists(lengths | st.just(0), min_size=1, max_size=2), width=st.integers(0, 99))
@settings(max_examples=10, phases=UNSHRUNK)
def test_rows_equal_float32(device: torch.device, shape: Shape, tokens: list[int], width: int) -> None:
    """Pages before the window, other layers, unwritten slots and the scratch are NaN."""
    rows = [(sequence(shape, max(length, 1), seed), length) for seed, length in enumerate(tokens)]
    check(shape, Paged(shape, device).decode(rows, width=width, forget=True), rows)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_of_heads(device: torch.device, group: int) -> None:
    shape = Shape(group=group)
    rows = [(sequence(shape, 70, 0), 70)]
    check(shape, Paged(shape, device).decode(rows), rows)


def test_more_heads_share_keys_than_a_product_has_rows(device: torch.device) -> None:
    shape = Shape(kv_heads=1, group=17)
    rows = [(sequence(shape, 70, 0), 70)]
    check(shape, Paged(shape, device).decode(rows), rows)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_dimension(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    shape = Shape(kv_heads=1, dim=dim, dtype=dtype)
    rows = [(sequence(shape, 70, 0), 70)]
    check(shape, Paged(shape, device).decode(rows), rows)


@given(
    shape=st.builds(
        Shape, kv_heads=st.just(1), group=st.integers(1, 8), dtype=st.sampled_from(list(TOLERANCE)), window=windows
    ),
    tokens=st.lists(lengths, min_size=1, max_size=2),
    width=st.integers(40, 99),
)
@settings(max_examples=5, phases=UNSHRUNK)
def test_a_rows_bits_do_not_depend_on_its_batch(
    device: torch.device, shape: Shape, tokens: list[int], width: int
) -> None:
    """The bits do not depend on padding rows, the tables' width or the scratch's size either."""
    rows = [(sequence(shape, length, seed), length) for seed, length in enumerate(tokens)]
    scratch = decode_scratch(len(rows) + 3, 128 * shape.page, shape.heads, shape.dim, device)
    padded = [*rows, (rows[0][0], 0)]
    together = Paged(shape, device).decode(padded, width=width, scratch=scratch)
    for i, row in enumerate(rows):
        alone = Paged(shape, device, seed=1).decode([row])
        assert torch.equal(together[i], alone[0])


@given(length=st.sampled_from([255, 256, 257, 320, 511, 512, 513]) | st.integers(200, 900), window=windows)
@settings(max_examples=5, phases=UNSHRUNK)
def test_parts_grow_if_a_sequence_has_too_many(device: torch.device, length: int, window: int | None) -> None:
    """The test has at most 4 parts of at least 64 tokens instead of 32 of 256, to be fast in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "MAX_PARTS", 4)
        patch.setattr(kernel, "PART_TOKENS", 64)
        shape = Shape(kv_heads=1, window=window)
        rows = [(sequence(shape, length, 0), length)]
        check(shape, Paged(shape, device).decode(rows, forget=True), rows)


def test_a_context_of_more_than_the_most_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "INTERPRETED", replace(INTERPRETED, tile=kernel.PART_TOKENS))
    length = kernel.PART_TOKENS * kernel.MAX_PARTS + 1
    shape = Shape(kv_heads=1, group=1)
    rows = [(sequence(shape, length, 0), length)]
    check(shape, Paged(shape, device).decode(rows), rows)


@given(tokens=st.integers(1, 200_000), more=st.integers(0, 200_000))
def test_parts_of_a_longer_sequence_are_as_many_or_more(tokens: int, more: int) -> None:
    """Scratch for the longest sequence is therefore enough for all."""
    assert 1 <= part_count(tokens) <= part_count(tokens + more) <= kernel.MAX_PARTS


def test_a_window_wider_than_the_context_changes_no_bit(device: torch.device) -> None:
    whole = sequence(Shape(), 300, 0)
    plain = Paged(Shape(), device).decode([(whole, 300)])
    windowed = Paged(Shape(window=301), device).decode([(whole, 300)])
    assert torch.equal(plain, windowed)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1024), (2, 255)])
def test_a_scratch_too_small_is_refused(device: torch.device, batch: int, tokens: int) -> None:
    shape = Shape()
    scratch = decode_scratch(batch, tokens, shape.heads, shape.dim, device)
    whole = sequence(shape, 300, 0)
    with pytest.raises(
        ValueError, match=f"scratch has room for {batch} rows of {part_count(tokens)} parts; 2 rows of 2"
    ):
        Paged(shape, device).decode([(whole, 300), (whole, 1)], scratch=scratch)
