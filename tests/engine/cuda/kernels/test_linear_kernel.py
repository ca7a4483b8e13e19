"""Products of a few rows with weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.backend.cuda.kernels.activation import silu_mul
from engine.backend.cuda.kernels.linear import FEW_ROWS, LEAST_ROWS, MOST_ROWS, gated_linear, linear, suits
from tests.engine.cuda.poisoned import Poisoned, random, units_off

HALF = [torch.float16, torch.bfloat16]
UNITS_OFF = {torch.float16: 1, torch.bfloat16: 2}
"""The kernel rounds once. Triton's interpreter truncates to bfloat16, where devices round."""
# (rows, inputs, outputs): one of each; whole tiles; sizes larger and smaller than whole tiles.
SHAPES = [
    (1, 1, 1),
    (2, 40, 3),
    (LEAST_ROWS, 256, 64),
    (5, 700, 65),
    (3, 512, 200),
    (17, 300, 70),
    (MOST_ROWS, 256, 64),
]


def poisoned_behind(values: Tensor) -> Tensor:
    """Return a copy in memory that continues with NaN."""
    flat = torch.full((values.numel() + 5000,), torch.nan, dtype=values.dtype, device=values.device)
    flat[: values.numel()] = values.flatten()
    return flat[: values.numel()].view(values.shape)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_linear(rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = poisoned_behind(random(rows, inputs, dtype=dtype, device=device))
    weight = poisoned_behind(random(outputs, inputs, dtype=dtype, device=device, seed=1))
    bias = random(outputs, dtype=dtype, device=device, seed=2) if biased else None
    out = Poisoned(rows, outputs, dtype, device)
    linear(x, weight, bias, out.tensor)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Sums are in float32. If terms cancel, the error is still in proportion to the terms, not to their sum.
    sizes = exact.abs().maximum((x.double().abs() @ weight.double().abs().T) * 2.0**-6)
    assert units_off(out.tensor, exact, sizes) <= UNITS_OFF[dtype]
    assert out.guards_stand()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_gated_linear_is_the_product_then_silu(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = poisoned_behind(random(rows, inputs, dtype=dtype, device=device))
    weight = poisoned_behind(random(2 * outputs, inputs, dtype=dtype, device=device, seed=1))
    out, product = Poisoned(rows, outputs, dtype, device), torch.empty(rows, 2 * outputs, dtype=dtype, device=device)
    gated_linear(x, weight, out.tensor)
    linear(x, weight, None, product)
    expected = torch.empty_like(out.tensor)
    silu_mul(product, expected)
    assert torch.equal(out.tensor, expected)
    gate, up = product.double().chunk(2, dim=-1)
    assert units_off(expected, silu(gate) * up) <= 4
    assert out.guards_stand()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("most", "counts"), [(LEAST_ROWS, (1, 3)), (MOST_ROWS, (33, 50))])
def test_a_rows_bits_do_not_depend_on_the_others(
    most: int, counts: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random(most, 300, dtype=dtype, device=device), random(70, 300, dtype=dtype, device=device, seed=1)
    together = torch.empty(most, 70, dtype=dtype, device=device)
    linear(x, weight, None, together)
    for rows in counts:
        alone = torch.empty(rows, 70, dtype=dtype, device=device)
        linear(x[5 : 5 + rows], weight, None, alone)
        assert torch.equal(alone, together[5 : 5 + rows])


def test_what_they_are_for() -> None:
    weight = torch.empty(8, 4, dtype=torch.bfloat16)
    x = torch.empty(FEW_ROWS + 1, 4, dtype=torch.bfloat16)
    assert suits(x[1:], weight)
    assert not suits(x, weight)
    assert not suits(x[1:].float(), weight.float())
    assert not suits(x[1:], weight.T)
    assert not suits(torch.empty(4, 3, dtype=torch.bfloat16).T, weight)
