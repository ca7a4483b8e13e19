"""Kernels run on the card if there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreted import interpret_kernels

interpret_kernels()

_HUGE = 1e30
"""A value whose square overflows in float32."""
_HUGE_IN_HALF = 6e4


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="package", autouse=True)
def nobody_reads_unwritten_memory() -> Iterator[None]:
    """Fill the tensors of `torch.empty` with huge numbers.

    New memory is mostly 0, so a test that reads unwritten memory passes on most machines and fails on some.
    Triton's interpreter computes with NumPy, where an overflow is a warning, and so an error in a test.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, _filling(getattr(torch, name)))
        patch.setattr(torch.Tensor, "new_empty", _filling(torch.Tensor.new_empty))
        yield


def _filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **named: Any) -> Tensor:
        tensor = make(*args, **named)
        if "out" not in named and tensor.is_floating_point() and tensor.device.type == "cpu":
            tensor.fill_(_HUGE_IN_HALF if tensor.dtype == torch.float16 else _HUGE)
        return tensor

    return made
