"""Triton's interpreter as these tests set it up: sums in one order, and overflow is an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.engine.cuda.devices import interpreted
from tests.interpreted import product


def test_a_products_bits_depend_on_row_and_column_alone() -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(shape, dtype=np.float32) for shape in ((33, 50), (50, 17)))
    whole = product(a, b, np.float32)
    summed = np.zeros_like(whole)
    for k in range(50):
        summed += a[:, k, None] * b[k]
    assert np.array_equal(whole, summed)
    assert np.array_equal(product(a[5:6], b, np.float32), whole[5:6])
    assert np.array_equal(product(a[:16], b[:, :2], np.float32), whole[:16, :2])
    assert np.array_equal(product(np.stack([a, -a]), np.stack([b, b]), np.float32), np.stack([whole, -whole]))


@triton.jit  # type: ignore[untyped-decorator]
def _operate(x, y, out, WHICH: tl.constexpr):  # type: ignore[no-untyped-def]
    a, b = tl.load(x), tl.load(y)
    if WHICH == "add":
        c = a + b
    elif WHICH == "sub":
        c = a - b
    else:
        c = a * b
    tl.store(out, c)


@interpreted
@pytest.mark.parametrize(
    ("which", "most", "x", "y"),
    [("add", 2**31 - 1, 2**30, 2**30), ("sub", -(2**31), -(2**30), 2**30 + 1), ("mul", 2**31 - 1, 2**16, 2**15)],
)
def test_an_overflow_is_an_error(which: str, most: int, x: int, y: int) -> None:
    given, one = torch.tensor([x, y], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InterpreterError, match=f"int32 overflow detected for operation {which}"):
        _operate[(1,)](given[:1], given[1:], out, which)
    given[0] = most
    _operate[(1,)](given[:1], one[which != "mul" :], out, which)
    assert out[0] == most
