"""Turns prompt chunks into the prefill kernel's tensors, without the engine's builder of steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.backend.cuda.kernels.step import PrefillTensors
from engine.backend.cuda.kernels.tiling import Tiling


def prefill_tensors(tiling: Tiling, chunks: Sequence[tuple[int, int]], tables: Tensor) -> PrefillTensors:
    """`chunks`: (tokens, tokens before the chunk) each. `tables` [chunks, pages]: blocks, on the device to use."""
    starts, cut = [0, *accumulate(tokens for tokens, _ in chunks)], tiling.cut(chunks)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=tables.device)

    return PrefillTensors(
        tokens=starts[-1],
        tables=tables,
        query_starts=ints(starts),
        contexts=ints([context for _, context in chunks]),
        tiles=torch.from_numpy(cut.tiles).to(tables.device),
        merged=torch.from_numpy(cut.merged).to(tables.device),
        rounds=cut.rounds,
    )
