"""Computes rows whose bits do not depend on the other rows of a step, as `--exact` requires.

A library chooses the order of summation in a matrix product by the shapes. So a row can have different bits in products
of 1 row and of 33, or as the first and the last row of 33. An exact product is therefore computed in tiles of only a
few heights. At start, a test on this processor with these threads finds the heights that give every row the same
order. The test is a sum whose terms cancel: its result is only the rounding error, which differs for another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.projection import Projection
from engine.model.rope import inverse_frequencies, rotate_, turns
from engine.model.weights import LayerWeights, ModelWeights

HEIGHTS = (4, 16, 64, 256, 1024)
"""Numbers of rows that a product may have. Most libraries use other routines below 4; above 1024 nothing is gained."""
_OFFSET_ROWS = 3
"""Rows before a tile in memory, so that the test covers tiles that are not aligned in memory."""
_GRAIN = 32_768
"""Elements up to which torch computes an elementwise operation on one thread (`at::internal::GRAIN_SIZE`)."""
_TURN_ROWS = 1024
"""Positions whose rotation is computed in one call."""


class NotExact(Exception):
    """A library on this machine changes its order of summation from call to call; the text names the operation."""


def cancelling(terms: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [terms] and w [terms, columns] such that x @ w is 0 except for rounding. Each call returns the same."""
    made = np.random.default_rng(0)
    half = terms // 2
    order = torch.from_numpy(made.permutation(terms))
    x = torch.zeros(terms)
    x[:half] = torch.from_numpy(made.standard_normal(half, np.float32))
    w = torch.zeros(terms, columns)
    w[:half] = torch.from_numpy(made.standard_normal((half, columns), np.float32))
    x[half : 2 * half], w[half : 2 * half] = -x[:half], w[:half]
    return x[order].to(dtype), w[order].to(dtype)


def agreeing_classes(
    multiply: Callable[[Tensor], Tensor], x: Tensor, heights: Sequence[int] = HEIGHTS
) -> list[tuple[int, ...]]:
    """Group `heights` by the order in which `multiply` sums: within a group all rows of all products have equal bits.

    `multiply`: [height, terms] -> [..., height, columns]. A height at which a product's rows differ is in no group.
    """
    classes: list[tuple[Tensor, list[int]]] = []
    for height in heights:
        rows = x.expand(_OFFSET_ROWS + height, -1).contiguous()
        results = [multiply(rows[start : start + height]) for start in (0, _OFFSET_ROWS)]
        first = results[0].reshape(-1, results[0].shape[-1])[0]
        if not all(bool((result == first).all()) for result in results):
            continue
        for reference, members in classes:
            if torch.equal(reference, first):
                members.append(height)
                break
        else:
            classes.append((first, [height]))
    return [tuple(members) for _, members in classes]


def agreeing_heights(
    multiply: Callable[[Tensor], Tensor], x: Tensor, heights: Sequence[int] = HEIGHTS
) -> tuple[int, ...]:
    """Return the largest of `agreeing_classes`, in a tie the one with the least height; (1,) if there is none.

    One row at a time is exact on any machine, because every call is the same, but it is slow.
    """
    return max(agreeing_classes(multiply, x, heights), key=len, default=(1,))


def exact_projection(projection: Projection) -> Projection:
    """Return a projection of the same weights that multiplies in tiles with one order of summation."""
    x, w = cancelling(projection.inputs, projection.outputs, projection.dtype)
    return projection.tiled(agreeing_heights(projection.like(w.t().contiguous()), x))


def check_exp() -> None:
    """Raise NotExact if NumPy's exp of a number depends on the number's place in an array."""
    values = np.random.default_rng(0).uniform(-90, 0, 257).astype(np.float32)
    whole = np.exp(values)
    for start in (1, 5, 8, 17):
        if not np.array_equal(np.exp(values[start:]), whole[start:]):
            raise NotExact("NumPy's exp of a number has different bits in another place of an array")


class ExactDecoder(Decoder):
    """A decoder whose rows have the same bits whatever other rows a step has. A step has a multiple of `row_multiple`
    tokens.

    Products use `agreeing_heights`. For sums of squares, torch reduces the last axis row by row. All else is
    elementwise: operations that IEEE 754 rounds correctly have one result. For the others (silu, the complex product)
    torch's inner loop uses different code for whole vectors and for what is left. So each inner loop covers one row, on
    one thread.
    """

    def __init__(self, model: Decoder) -> None:
        """Tests the libraries. Call it in the thread in which steps will run. Raises NotExact."""
        check_exp()
        asked: dict[tuple[object, ...], tuple[int, ...]] = {}

        def exact(projection: Projection) -> Projection:
            kind = projection.kind
            if kind not in asked:
                asked[kind] = exact_projection(projection).heights
            return projection.tiled(asked[kind])

        weights = model.weights
        layers = tuple(_with_products(layer, exact) for layer in weights.layers)
        super().__init__(model.config, _replaced(weights, layers, exact(weights.head)))
        self.row_multiple = max(HEIGHTS[0], *(heights[0] for heights in asked.values()))
        self._turns = _TurnTable(model.config, self.device)

    def _rotation(self, positions: Tensor) -> Tensor:
        return self._turns.of(positions)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.mul_(norm).mul_(1 / x.shape[-1]).add_(self._eps).sqrt_().reciprocal_()
        normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
        return normed

    def _rotate(self, qk: Tensor, rotation: Tensor) -> None:
        for rows in _lines(len(qk), qk[0].numel()):
            rotate_(qk[rows], rotation[rows])

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        out = gate.new_empty(gate.shape)
        for rows in _lines(len(gate), gate.shape[1]):
            torch.mul(silu(gate[rows]), up[rows], out=out[rows])
        return out


class _TurnTable:
    """Rotations by position, each computed once, in calls of one shape. Grows to the largest position used."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._scale = config.rope.attention_factor
        self._table = self._made(0)

    def of(self, positions: Tensor) -> Tensor:
        """Return the same as `rope.turns`."""
        last = int(positions.max())
        if last >= len(self._table):
            blocks = range(len(self._table) // _TURN_ROWS, last // _TURN_ROWS + 1)
            self._table = torch.cat([self._table, *map(self._made, blocks)])
        return self._table.index_select(0, positions)

    def _made(self, block: int) -> Tensor:
        start = block * _TURN_ROWS
        positions = torch.arange(start, start + _TURN_ROWS, device=self._frequencies.device)
        return turns(positions, self._frequencies, self._scale)


def _lines(rows: int, row_elements: int) -> Iterator[slice]:
    """Return the rows to compute at once, few enough that torch uses one thread: several threads could split a row."""
    step = max(1, rows) if torch.get_num_threads() == 1 else max(1, (_GRAIN - 1) // row_elements)
    return (slice(start, start + step) for start in range(0, rows, step))


def _with_products(layer: LayerWeights, exact: Callable[[Projection], Projection]) -> LayerWeights:
    return replace(
        layer,
        qkv=exact(layer.qkv),
        output=exact(layer.output),
        gate_up=exact(layer.gate_up),
        down=exact(layer.down),
    )


def _replaced(weights: ModelWeights, layers: tuple[LayerWeights, ...], head: Projection) -> ModelWeights:
    return replace(weights, layers=layers, head=head)
