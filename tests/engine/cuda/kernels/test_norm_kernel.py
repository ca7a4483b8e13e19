"""RMS norm, alone and fused with the residual sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.backend.cuda.kernels.norm import add_rms_norm, rms_norm
from engine.model.decoder import rms_norm as reference
from tests.engine.cuda.poisoned import Poisoned, random, units_off

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (5, 7), (3, 48), (2, 513), (4, 1024), (1, 5120)]
EPS = 1e-5
UNITS_OFF = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 4}
"""The kernel rounds twice. Triton's interpreter truncates to bfloat16, where devices round."""


def exact(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_norm(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x = Poisoned.holding(random(rows, columns, dtype=dtype, device=device))
    weight = random(columns, dtype=dtype, device=device, seed=1)
    given, out = x.tensor.clone(), Poisoned(rows, columns, dtype, device)
    rms_norm(x.tensor, weight, EPS, out.tensor)
    assert units_off(out.tensor, exact(given, weight)) <= UNITS_OFF[dtype]
    assert torch.equal(x.tensor, given)
    assert out.guards_stand()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sum_and_norm(rows: int, columns: int, dtype: torch.dtype, in_place: bool, device: torch.device) -> None:
    x = Poisoned.holding(random(rows, columns, dtype=dtype, device=device))
    residual = Poisoned.holding(random(rows, columns, dtype=dtype, device=device, seed=2))
    weight = random(columns, dtype=dtype, device=device, seed=1)
    added, before = x.tensor.clone(), residual.tensor.clone()
    out = x if in_place else Poisoned(rows, columns, dtype, device)
    add_rms_norm(x.tensor, residual.tensor, weight, EPS, out.tensor)
    assert units_off(residual.tensor, added.double() + before.double()) <= 1
    # The reference, too, norms the rounded sum.
    assert units_off(out.tensor, exact(residual.tensor, weight)) <= UNITS_OFF[dtype]
    assert out.guards_stand()
    assert residual.guards_stand()
    assert in_place or torch.equal(x.tensor, added)


def test_it_rounds_where_the_reference_does(device: torch.device) -> None:
    """Rounding once at the end, not also before the weight is applied, would change more than one result in ten."""
    x, weight = (random(*shape, dtype=torch.float16, device=device) for shape in ((8, 512), (512,)))
    out = torch.full_like(x, torch.nan)
    rms_norm(x, weight, EPS, out)
    expected = reference(x, weight, torch.tensor(EPS, device=device))
    assert (out != expected).float().mean() < 0.01
    assert (exact(x, weight).half() != expected).float().mean() > 0.1


def test_small_rows_keep_epsilon(device: torch.device) -> None:
    """The rows have zeros, or values whose squares vanish beside epsilon."""
    x = torch.tensor([[0.0, 0.0, 0.0], [1e-4, -1e-4, 2e-4]], device=device)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, torch.ones(3, device=device), EPS, out)
    torch.testing.assert_close(out.double(), exact(x, torch.ones(3, device=device)))
