"""QK norm, rotary embedding and the store into pages, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.backend.cuda.kernels.rope_store import rope_store
from engine.model.decoder import rms_norm
from engine.model.rope import rotate_, turns
from tests.engine.cuda.poisoned import Poisoned, random, units_off

EPS = 1e-6
LAYERS, LAYER, BLOCKS = 3, 1, 6
UNITS_OFF = {torch.float32: 8, torch.float16: 2, torch.bfloat16: 4}
"""Triton's interpreter truncates to bfloat16, where devices round."""


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes of a model and its pages."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    normed: bool = False

    @property
    def all_heads(self) -> int:
        return self.heads + 2 * self.kv_heads


CASES = [
    Case(6, 2, 8),
    Case(6, 2, 8, normed=True),
    Case(1, 1, 2),
    Case(3, 3, 10, 3, torch.float16, True),
    Case(7, 1, 80, 1, torch.float16),
    Case(14, 2, 64, 16, torch.float16),
    Case(33, 3, 96, 2, torch.float32, True),
    Case(9, 3, 256, 4, torch.bfloat16),
    Case(5, 1, 128, 4, torch.bfloat16, True),
]


@dataclass(frozen=True, slots=True)
class Run:
    """A launch's inputs and results."""

    given: Tensor
    """[T, all heads, dim]"""
    queries: Tensor
    pool: Tensor
    slots: Tensor
    expected: Tensor
    """Like `given`, with queries and keys normed and rotated by the reference in float32."""


def run(case: Case, device: torch.device, slots: list[int]) -> Run:
    count = len(slots)
    qkv = Poisoned.holding(random(count, case.all_heads * case.dim, dtype=case.dtype, device=device))
    given = qkv.tensor.view(count, case.all_heads, case.dim).clone()
    norm = random(case.heads + case.kv_heads, case.dim, dtype=case.dtype, device=device, seed=1)
    positions = torch.tensor([0, 5, 8191, 1, 70_000, 3, 2][:count], dtype=torch.int32, device=device)
    rotation = turns(positions, 1.0 / 100 ** torch.linspace(0, 1, case.dim // 2, device=device), 1.25)
    shape = (BLOCKS, LAYERS, 2, case.block_size, case.kv_heads, case.dim)
    pool = torch.full(shape, torch.nan, dtype=case.dtype, device=device)
    at = torch.tensor(slots, device=device)
    rope_store(
        qkv.tensor,
        torch.view_as_real(rotation),
        at,
        norm if case.normed else None,
        EPS,
        pool,
        LAYER,
        heads=case.heads,
        kv_heads=case.kv_heads,
    )
    assert qkv.guards_stand()
    left = qkv.tensor.view(given.shape)
    # Keys and values are stored in pages; here they must not change.
    assert torch.equal(left[:, case.heads :], given[:, case.heads :])
    expected = given.clone()
    turned = expected[:, : -case.kv_heads]
    if case.normed:
        turned.copy_(rms_norm(turned, norm, torch.tensor(EPS, device=device)))
    expected = expected.float()
    rotate_(expected[:, : -case.kv_heads], rotation)
    return Run(given, left[:, : case.heads], pool, at, expected)


def turned_off(found: Tensor, expected: Tensor) -> float:
    """Return `units_off` at the norm of each rotated pair, because one value may be a small difference of large
    products."""
    pairs = expected.reshape(*expected.shape[:-1], -1, 2)
    return units_off(found, expected, pairs.norm(dim=-1, keepdim=True).expand_as(pairs).flatten(-2))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_turn_in_place_and_keys_and_values_reach_their_slots(case: Case, device: torch.device) -> None:
    """Only the named slots of the layer are written, and none for slot -1."""
    size = case.block_size
    slots = [4 * size, -1, 0, BLOCKS * size - 1, -1]
    done = run(case, device, slots)
    assert turned_off(done.queries, done.expected[:, : case.heads]) <= UNITS_OFF[case.dtype]
    stored = done.slots >= 0
    blocks, offsets = done.slots[stored] // size, done.slots[stored] % size
    keys, values = (done.pool[blocks, LAYER, part, offsets] for part in (0, 1))
    expected_keys = done.expected[:, case.heads : -case.kv_heads]
    assert turned_off(keys, expected_keys[stored]) <= UNITS_OFF[case.dtype]
    assert torch.equal(values, done.given[stored, -case.kv_heads :])
    rest = done.pool.clone()
    rest[blocks, LAYER, :, offsets] = torch.nan
    assert rest.isnan().all()


def test_it_rounds_where_the_reference_does(device: torch.device) -> None:
    """The kernel also rounds between norm, weight and rotation, as `expected` does. Rounding once would differ."""
    case = Case(12, 2, 64, dtype=torch.float16, normed=True)
    done = run(case, device, [0, 1, 2, 3, 4])
    assert (done.queries != done.expected[:, :12].half()).float().mean() < 0.01
    wide = done.given.float()
    once = wide / wide.square().mean(-1, keepdim=True).add(EPS).sqrt()
    assert units_off(once[:, 12:14].half(), done.expected[:, 12:14]) > 2


def test_a_pool_of_more_elements_than_32_bits_count(device: torch.device) -> None:
    """The last block is written. On the CPU untouched memory is not allocated; a card has the 4 GiB."""
    dim, size = 8, 4
    blocks = 2**31 // (2 * size * dim) + 1
    pool = torch.empty((blocks, 1, 2, size, 1, dim), dtype=torch.float16, device=device)
    pool[-1] = torch.nan
    qkv = random(1, 3 * dim, dtype=torch.float16, device=device)
    rotation = turns(torch.tensor([0], device=device), torch.ones(dim // 2, device=device), 1.0)
    slot = torch.tensor([blocks * size - 3], device=device)
    rope_store(qkv, torch.view_as_real(rotation), slot, None, EPS, pool, 0, heads=1, kv_heads=1)
    assert torch.equal(pool[-1, 0, :, 1, 0], qkv.view(3, dim)[1:])
    assert pool[-1, 0, :, [0, 2, 3]].isnan().all()
