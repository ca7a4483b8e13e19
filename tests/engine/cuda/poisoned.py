"""Outputs that show what a kernel wrote: NaN inside, and rows before and after that must not change."""

from __future__ import annotations

import torch
from torch import Tensor

_GUARD_ROWS = 3
_GUARD = 77.0


class Poisoned:
    """`tensor` [rows, columns] full of NaN, in the middle of a larger tensor."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (rows + 2 * _GUARD_ROWS, columns)
        self._whole = torch.full(shape, _GUARD, dtype=dtype, device=device)
        self.tensor = self._whole[_GUARD_ROWS:-_GUARD_ROWS].fill_(torch.nan)

    @staticmethod
    def holding(values: Tensor) -> Poisoned:
        """Return a Poisoned whose tensor is a copy of `values` [rows, columns]."""
        rows, columns = values.shape
        poisoned = Poisoned(rows, columns, values.dtype, values.device)
        poisoned.tensor.copy_(values)
        return poisoned

    def guards_stand(self) -> bool:
        """Whether nothing was written outside the tensor."""
        guards = self._whole[:_GUARD_ROWS], self._whole[-_GUARD_ROWS:]
        return all(bool((guard == _GUARD).all()) for guard in guards)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Return normal values, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def units_off(found: Tensor, exact: Tensor, sizes: Tensor | None = None) -> float:
    """Return the largest distance between the two, in units in the last place. A unit is the spacing of `found`'s type
    at numbers as large as `sizes` (None: the exact values), but at least the spacing at 2^-6."""
    sizes = exact if sizes is None else sizes
    spacing = torch.finfo(found.dtype).eps * sizes.abs().clamp(min=2.0**-6).log2().floor().exp2()
    return float(((found.to(exact.dtype) - exact).abs() / spacing).max())
