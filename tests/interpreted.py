"""Triton's kernels without a card."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_EXACT: dict[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""The NumPy functions for the operations of Triton's language, by name."""


def interpret_kernels() -> None:
    """Have kernels interpreted in this process if there is no card. Triton decides when it is imported.

    Raises RuntimeError if Triton was imported before, for compiling.
    """
    if torch.cuda.is_available():
        return
    set_up_interpreter()


@cache
def set_up_interpreter() -> None:
    """Have kernels interpreted in this process, with sums in one order and without the interpreter's slowest steps.

    A second call does nothing. Raises RuntimeError if Triton was imported before, for compiling.
    """
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it for the whole of pytest")
    os.environ["TRITON_INTERPRET"] = "1"
    _sum_in_one_order()
    _replace_the_language_once()
    _check_overflow_in_one_step()
    _copy_back_only_copies()


def _sum_in_one_order() -> None:
    """Replace the interpreter's matrix product by `product`.

    The interpreter's own product is NumPy's, which a BLAS computes. Some kernels of a BLAS (OpenBLAS for Zen and
    Haswell) sum in another order if there are more rows. On tensor cores a row's bits do not depend on other rows.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *_precision: Any) -> Any:
        if np.uint8 in (a.data.dtype, b.data.dtype):
            raise TypeError("this product does not support floats of 8 bits")
        return TensorHandle(product(a.data, b.data, acc.data.dtype) + acc.data, acc.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def _replace_the_language_once() -> None:
    """Replace the functions of Triton's language once, instead of at every launch.

    The interpreter replaces some 600 of them at every launch, and at every call of a function in a kernel. A process
    that interprets never needs the originals, which are for compiling.
    """
    from triton import language
    from triton.runtime import interpreter

    replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    nothing = type(replaced)
    interpreter._patch_lang = lambda _kernel: nothing()


def _check_overflow_in_one_step() -> None:
    """Check sums and products of integers for overflow in one step. The interpreter does it with a dozen operations."""
    from triton.language.semantic import TritonSemantic

    def check(self: Any, a: Any, b: Any, operation: Callable[..., Any]) -> None:
        kind = a.type.scalar
        if kind.int_bitwidth >= 64:
            return
        exact = _EXACT[operation.__name__](a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
        if exact.max() > kind.get_int_max_value() or exact.min() < kind.get_int_min_value():
            raise OverflowError(f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}")

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def _copy_back_only_copies() -> None:
    """Leave arguments on the CPU as the kernel left them.

    After a launch the interpreter copies each argument's whole storage back, even onto itself. That writes every page,
    even of a pool of 4 GiB in which the kernel wrote a few bytes.
    """
    from triton.runtime.interpreter import GridExecutor

    copy_back = GridExecutor._restore_args_dev

    def copy_copies_back(self: Any, given: Any, used: Any, named: Any, used_named: Any) -> None:
        pairs = [*zip(given, used, strict=True), *((named[name], used_named[name]) for name in named)]
        pairs = [(a, b) for a, b in pairs if not (hasattr(a, "data_ptr") and a.data_ptr() == b.data_ptr())]
        copy_back(self, [a for a, _ in pairs], [b for _, b in pairs], {}, {})

    GridExecutor._restore_args_dev = copy_copies_back


def product(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """a [..., M, K] times b [..., K, N] -> [..., M, N] of `dtype`, summed from the first to the last of K.

    On every machine, the bits of an element depend only on its row of `a` and its column of `b`.
    """
    # A sum along an axis that is not the last one adds whole rows, one after the other.
    a = np.ascontiguousarray(np.moveaxis(a, -1, 0), dtype=dtype)
    b = np.ascontiguousarray(np.moveaxis(b, -2, 0), dtype=dtype)
    summed: npt.NDArray[Any] = np.add.reduce(a[..., None] * b[..., None, :], axis=0)
    return summed
