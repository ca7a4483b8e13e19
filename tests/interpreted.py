"""Triton's kernels without a card."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def interpret_kernels() -> None:
    """Where there is no card, have kernels interpreted in this process: Triton decides when it is imported.

    Raises RuntimeError if Triton was imported before, for compiling.
    """
    if torch.cuda.is_available():
        return
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it for the whole of pytest")
    os.environ["TRITON_INTERPRET"] = "1"
    _sum_in_one_order()


def _sum_in_one_order() -> None:
    """Replace the interpreter's matrix product by `product`.

    The interpreter's own is NumPy's, and so that of a BLAS. Some of its kernels (OpenBLAS for Zen and Haswell) sum in
    another order if there are more rows. No tensor core does that: a row's bits are its own.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *_precision: Any) -> Any:
        if np.uint8 in (a.data.dtype, b.data.dtype):
            raise TypeError("this product does not know floats of 8 bits")
        return TensorHandle(product(a.data, b.data, acc.data.dtype) + acc.data, acc.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def product(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """a [..., M, K] times b [..., K, N] -> [..., M, N] of `dtype`, summed from the first to the last of K.

    The bits of an element depend on its row of `a` and its column of `b` alone, on every machine.
    """
    a, b = a.astype(dtype, copy=False), np.ascontiguousarray(b, dtype=dtype)
    out = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    term = np.empty_like(out)
    for k in range(a.shape[-1]):
        np.multiply(a[..., k, None], b[..., k, None, :], out=term)
        out += term
    return out
