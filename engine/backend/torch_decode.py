"""Decode attention of a whole batch straight from the paged pool, for float32 on the CPU.

One token attends to its sequence's slots: a sparse [heads, slots] product. So scores are torch's sampled matrix product
over CSR indexes (one row per sequence and head, one entry per visible slot), and the weighted sum of values is an
embedding bag over the same indexes. Nothing is gathered or padded, and no slot is read that the indexes do not name.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


class SparseDecode:
    """The indexes of one step's decoding sequences, for the layers of one window."""

    def __init__(self, slots: Sequence[Tensor], *, heads: int, kv_heads: int, dim: int, rows: int) -> None:
        """`slots`: per sequence, the key slots that it sees, as `KvPool.slot_rows`.

        `rows`: length of the tables that `attend` is given.
        """
        head = torch.arange(heads)[:, None] // (heads // kv_heads)
        index = torch.int32 if rows < 2**31 else torch.int64
        self._columns = torch.cat([(seen * kv_heads + head).flatten() for seen in slots]).to(index)
        lengths = torch.tensor([len(seen) for seen in slots]).repeat_interleave(heads)
        self._ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(index)
        self._scores = torch.sparse_csr_tensor(
            self._ends, self._columns, torch.zeros(len(self._columns)), (len(lengths), rows), check_invariants=False
        )
        self._weights = torch.empty(len(self._columns))
        sizes = [heads * len(seen) for seen in slots]
        parts = zip(torch.split(self._scores.values(), sizes), torch.split(self._weights, sizes), strict=True)
        self._per_sequence = [(scores.view(heads, -1), weights.view(heads, -1)) for scores, weights in parts]
        self._scale = dim**-0.5

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [sequences, heads, dim]; keys and values [rows, dim] of a layer, row = slot * kv_heads + head -> like q."""
        torch.sparse.sampled_addmm(self._scores, q.flatten(0, 1), keys.t(), beta=0, alpha=self._scale, out=self._scores)
        for scores, weights in self._per_sequence:
            torch.softmax(scores, -1, out=weights)
        summed = embedding_bag(
            self._columns, values, self._ends, mode="sum", per_sample_weights=self._weights, include_last_offset=True
        )
        return summed.view_as(q)


def supports_sparse_decode(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has these operations for this type and device: tried here, which also spends its beta warning."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    table = torch.ones(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            probe = SparseDecode([torch.tensor([1])], heads=1, kv_heads=1, dim=1, rows=2)
            probe.attend(torch.ones(1, 1, 1), table, table)
        except RuntimeError:
            return False
    return True
