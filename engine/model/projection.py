"""Matrix products with fixed weights, in the layout that the device multiplies fastest."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import linear


class Projection:
    """y = x W^T + b.

    float32 weights on an x86 CPU are kept in oneDNN's blocked layout: for 16 rows that is about twice as fast as MKL on
    the plain matrix, for 2,048 rows about 1.1 times (measured on an AMD EPYC, one thread). The plain matrix is dropped.

    `tiled` restricts the number of rows that are multiplied at once to `heights` (`exact.py`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> None:
        """weight [out, in], bias [out]. `shared`: the weight is also in use elsewhere, so it is not reordered."""
        self._bias = bias
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.heights: tuple[int, ...] = ()
        """Allowed numbers of rows at once, ascending; empty: any number."""
        self._packed = not shared and _packs(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    @property
    def plain(self) -> tuple[Tensor, Tensor | None] | None:
        """weight [out, in] and bias [out]; None if the matrix is not kept plain."""
        return None if self._packed else (self._weight, self._bias)

    @property
    def kind(self) -> tuple[object, ...]:
        """Two projections of equal kind are multiplied by the same calls."""
        return self.outputs, self.inputs, self.dtype, self._packed, self._bias is None

    def like(self, weight: Tensor) -> Projection:
        """Return a projection of the same kind with `weight` [out, in], and a bias of zeros if this one has a bias."""
        bias = None if self._bias is None else torch.zeros_like(self._bias)
        return Projection(weight, bias, shared=not self._packed)

    def tiled(self, heights: tuple[int, ...]) -> Projection:
        """Return a projection with the same matrix. The number of rows that it multiplies at once is one of `heights`.

        The number of rows must be a multiple of the smallest height.
        """
        other = copy(self)
        other.heights = heights
        return other

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if not self.heights or not len(x) or len(x) in self.heights:
            return self._multiply(x)
        parts, start = [], 0
        for height in reversed(self.heights):
            while len(x) - start >= height:
                parts.append(self._multiply(x[start : start + height]))
                start += height
        if start < len(x):
            raise ValueError(f"{len(x)} rows are not a multiple of {self.heights[0]}")
        return torch.cat(parts)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return linear(x, self._weight, self._bias)

    def into(self, x: Tensor, out: Tensor) -> None:
        """x [T, in] -> out [T, out]. Allocates nothing if the matrix is kept plain, as on CUDA."""
        if self._packed:
            out.copy_(self(x))
        elif self._bias is None:
            torch.mm(x, self._weight.t(), out=out)
        else:
            torch.addmm(self._bias, x, self._weight.t(), out=out)


def _packs(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    )
