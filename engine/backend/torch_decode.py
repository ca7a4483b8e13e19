"""Decode attention of a whole batch straight from the paged pool, for float32 on the CPU.

One token attends to its sequence's slots: a sparse [heads, slots] product. So scores are torch's sampled matrix product
over CSR indexes (one row per sequence and head, one entry per visible slot), and the weighted sum of values is an
embedding bag over the same indexes. Nothing is gathered or padded, and only slots named by the indexes are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SUM = 0
"""The mode of embedding_bag that sums."""


class SparseDecode:
    """The indexes of one step's decoding sequences, for the layers of one window."""

    def __init__(self, runs: Sequence[NDArray[np.int64]], *, heads: int, kv_heads: int, dim: int, rows: int) -> None:
        """`runs`: [sequences, slots] each, the visible key slots of neighbouring sequences that see equally many.

        `rows`: number of rows of the tables passed to `attend`.
        """
        index: np.dtype[Any] = np.dtype(np.int32 if rows < 2**31 else np.int64)
        # numpy: for so few numbers a torch operation costs several times as much.
        head = np.arange(heads, dtype=index)[:, None] // (heads // kv_heads)
        columns = [(run.astype(index)[:, None] * kv_heads + head).ravel() for run in runs]
        lengths = np.repeat([run.shape[1] for run in runs], [run.shape[0] * heads for run in runs])
        ends = np.zeros(len(lengths) + 1, dtype=index)
        lengths.cumsum(out=ends[1:])
        self._columns, self._ends = torch.from_numpy(np.concatenate(columns)), torch.from_numpy(ends)
        self._scores = torch.sparse_csr_tensor(
            self._ends, self._columns, torch.zeros(len(self._columns)), (len(lengths), rows), check_invariants=False
        )
        self._weights = torch.empty(len(self._columns))
        sizes = [len(column) for column in columns]
        parts = zip(runs, torch.split(self._scores.values(), sizes), torch.split(self._weights, sizes), strict=True)
        self._runs = [(scores.view(-1, run.shape[1]), weights.view(-1, run.shape[1])) for run, scores, weights in parts]
        self._scale = dim**-0.5

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [sequences, heads, dim]; keys and values [rows, dim] of a layer, row = slot * kv_heads + head -> like q."""
        torch.sparse.sampled_addmm(self._scores, q.flatten(0, 1), keys.t(), beta=0, alpha=self._scale, out=self._scores)
        for scores, weights in self._runs:
            torch.softmax(scores, -1, out=weights)
        # torch's own binding, because torch.nn.functional.embedding_bag would check its arguments at every layer.
        summed: Tensor = torch.embedding_bag(
            values, self._columns, self._ends, False, _SUM, False, self._weights, include_last_offset=True
        )[0]
        return summed.view(q.shape)


def supports_sparse_decode(dtype: torch.dtype, device: torch.device) -> bool:
    """Test whether torch has these operations for this type and device. The trial also uses up torch's beta warning."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    table = torch.ones(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            probe = SparseDecode([np.array([[1]])], heads=1, kv_heads=1, dim=1, rows=2)
            probe.attend(torch.ones(1, 1, 1), table, table)
        except RuntimeError:
            return False
    return True
