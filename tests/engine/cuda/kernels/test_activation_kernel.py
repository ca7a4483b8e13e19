"""silu(gate) * up."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from engine.backend.cuda.kernels.activation import silu_mul
from tests.engine.cuda.poisoned import Poisoned, random, units_off

UNITS_OFF = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 4}
"""The kernel rounds twice. Triton's interpreter truncates to bfloat16, where devices round."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 40), (2, 1024), (5, 1025), (1, 3000)])
def test_silu_mul(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = Poisoned.holding(4 * random(rows, 2 * columns, dtype=dtype, device=device))
    given, out = gate_up.tensor.clone(), Poisoned(rows, columns, dtype, device)
    silu_mul(gate_up.tensor, out.tensor)
    gate, up = given.double().chunk(2, dim=-1)
    assert units_off(out.tensor, silu(gate) * up) <= UNITS_OFF[dtype]
    assert torch.equal(gate_up.tensor, given)
    assert out.guards_stand()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_extreme_gates(device: torch.device) -> None:
    """If the exponential overflows or vanishes, silu is 0 or the gate."""
    gates = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], device=device)
    out = torch.full((1, 5), torch.nan, device=device)
    silu_mul(torch.cat((gates, torch.full_like(gates, 2.0)))[None], out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 400.0, 2e4]], device=device))


def test_it_rounds_where_torch_does(device: torch.device) -> None:
    gate_up = random(8, 1024, dtype=torch.float16, device=device)
    out = torch.full((8, 512), torch.nan, dtype=torch.float16, device=device)
    silu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = silu(gate) * up
    assert (out != expected).float().mean() < 0.01
    assert ((silu(gate.float()) * up.float()).half() != expected).float().mean() > 0.1
