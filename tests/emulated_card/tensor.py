"""A tensor of the emulated card. Every operation on it is passed to the card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from tests.emulated_card.card import Card
    from tests.emulated_card.memory import Allocation


class CardTensor(Tensor):
    """A wrapper tensor of torch, which has a shape and a type but no memory. To torch it is a "meta" tensor. If it were
    on "cuda", torch would ask which device is current, and a build without CUDA would raise."""

    data_here: Tensor
    """Host memory that has the tensor's values once the work on them is done."""
    allocation: Allocation
    card: Card

    @staticmethod
    def __new__(cls, data: Tensor, allocation: Allocation, card: Card) -> CardTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device("meta"),
        )
        made.data_here, made.allocation, made.card = data, allocation, card
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch says to

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        card = next(leaf.card for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, CardTensor))
        return card.dispatch(func, args, kwargs)

    def part(self, data: Tensor) -> CardTensor:
        """Return a view: `data` is a view of `data_here`."""
        with torch.inference_mode(self.is_inference()):  # a view is an inference tensor if its base is one
            return CardTensor(data, self.allocation, self.card)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.card.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        return self.data_here.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Tensor:
        part, places = self._viewed(index)
        return torch.ops.aten.index.Tensor(part, places) if places else part

    def __setitem__(self, index: Any, value: Any) -> None:
        part, places = self._viewed(index)
        mask = places[0] if len(places) == 1 else None
        if mask is not None and mask.dtype == torch.bool and not isinstance(value, Tensor):
            part.masked_fill_(mask.reshape(*mask.shape, *[1] * (part.dim() - mask.dim())), value)
        elif places:
            value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype, device=self.device)
            torch.ops.aten.index_put_(part, places, value)
        elif isinstance(value, Tensor):
            part.copy_(value)
        else:
            part.fill_(value)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CardTensor({tuple(self.shape)}, {self.dtype})"

    def _viewed(self, index: Any) -> tuple[CardTensor, list[Tensor | None]]:
        """Return the view by all indices that are not tensors; and each dimension's index tensor, or None."""
        indices = list(index) if isinstance(index, tuple) else [index]
        named = sum(one is not None and one is not Ellipsis for one in indices)
        data, dim = self.data_here, 0
        places: list[Tensor | None] = []
        for one in indices:
            if isinstance(one, int | np.integer) or (
                isinstance(one, Tensor) and not one.dim() and one.dtype != torch.bool
            ):
                data = data.select(dim, int(one))
                continue
            if one is Ellipsis:
                dim += self.dim() - named
                continue
            if one is None:
                data = data.unsqueeze(dim)
            elif isinstance(one, slice):
                data = data[(slice(None),) * dim + (one,)]
            else:
                places += [None] * (dim - len(places)) + [one if isinstance(one, Tensor) else torch.tensor(one)]
            dim += 1
        return self.part(data), places
