"""The matrix products of a decode step with few sequences: the engine's own kernel compared with torch's (cuBLAS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backend.cuda.kernels.activation import silu_mul
from engine.backend.cuda.kernels.linear import gated_linear, linear
from engine.model.config import ModelConfig
from tests.bench.gpu.parts.ceilings import timed_s

_REPEATS = 3
_BYTES = 2 << 30
"""Total size of the matrices that take turns, so that no cache holds them."""
_GATED = "gate, up, SiLU"
_MOST = 32
"""Maximum number of matrices that take turns, if they are small."""


@dataclass(frozen=True, slots=True)
class ProductFigure:
    """The product of some rows and one kind of weight matrix."""

    what: str
    rows: int
    ours_s: float
    torch_s: float
    read_s: float
    """Bytes of the matrix / the measured copy bandwidth."""

    @property
    def share(self) -> float:
        """Return the share of the roofline's speed."""
        return self.read_s / self.ours_s

    @property
    def ratio(self) -> float:
        """Return torch's time / ours."""
        return self.torch_s / self.ours_s


def measure_products(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, rows: Sequence[int], copy_bytes_per_s: float
) -> list[ProductFigure]:
    """Measure every kind of matrix of the model with every number of `rows`, in bfloat16 if `dtype` has no kernel. The
    product for gates and ups includes their SiLU, as in the engine."""
    hidden, inner, queries = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    shapes = {
        "qkv": (hidden, queries + 2 * config.kv_heads * config.head_dim),
        "output": (queries, hidden),
        _GATED: (hidden, 2 * inner),
        "down": (inner, hidden),
        "head": (hidden, config.vocab_size),
    }
    kind = torch.bfloat16 if dtype == torch.float32 else dtype
    figures = []
    for name, (inputs, columns) in shapes.items():
        count = max(1, min(_MOST, _BYTES // (inputs * columns * kind.itemsize))) if device.type == "cuda" else 1
        weights = [torch.randn((columns, inputs), device=device, dtype=kind) for _ in range(count)]
        figures += [_measure(name, weights, n, copy_bytes_per_s) for n in rows]
        del weights
    return figures


def _measure(name: str, weights: Sequence[Tensor], rows: int, copy_bytes_per_s: float) -> ProductFigure:
    columns, inputs = weights[0].shape
    device = weights[0].device
    x = torch.randn((rows, inputs), device=device, dtype=weights[0].dtype)
    product = torch.empty((rows, columns), device=device, dtype=weights[0].dtype)
    activated = torch.empty((rows, columns // 2), device=device, dtype=weights[0].dtype)

    def ours() -> None:
        for weight in weights:
            if name == _GATED:
                gated_linear(x, weight, activated)
            else:
                linear(x, weight, None, product)

    def theirs() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=product)
            if name == _GATED:
                silu_mul(product, activated)

    ours_s, torch_s = (timed_s(device, recorded(device, work), _REPEATS) / len(weights) for work in (ours, theirs))
    read_s = weights[0].nbytes / copy_bytes_per_s
    return ProductFigure(f"{name}, {inputs} x {columns}", rows, ours_s, torch_s, read_s)


def recorded(device: torch.device, work: Callable[[], None]) -> Callable[[], object]:
    """Return `work` as a CUDA graph; single launches would measure the host instead."""
    work()
    if device.type != "cuda":
        return work
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
