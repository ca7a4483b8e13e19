"""Stand-ins for torch's functions that make tensors, for tensors on the card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from tests.emulated_card.card import Card
from tests.emulated_card.tensor import CardTensor

_SENT = ("tensor", "as_tensor")
"""Functions that make tensors from values on the host."""
_COMPUTED = ("arange", "linspace", "randperm")
"""Functions whose tensors a card computes from the arguments, so the host does not wait."""
_library: list[Any] = []


def stand_in_for_creation(card: Card, patch: Callable[[Any, str, Any], None]) -> None:
    """Have this card make tensors on "cuda", and have it note the memory of page-locked tensors."""
    _create_empty(card)
    for name in (*_SENT, *_COMPUTED):
        patch(torch, name, _making(card, getattr(torch, name), computed=name in _COMPUTED))
    patch(torch, "empty", _locking(card, torch.empty))
    patch(torch.Tensor, "to", _moving(card, torch.Tensor.to))
    patch(torch.Tensor, "cuda", lambda self, device="cuda", **named: self.to(device, **named))
    patch(torch, "Generator", _generators(torch.Generator))


def _create_empty(card: Card) -> None:
    """Replace the two operations that all of torch's other functions call to make a tensor."""

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return card.empty(size, dtype or torch.get_default_dtype())

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return card.empty(size, dtype or torch.get_default_dtype(), stride)

    _library[:] = [torch.library.Library("aten", "IMPL")]  # replaces the library of an earlier card, if any
    _library[0].impl("empty.memory_format", empty, "CUDA")
    _library[0].impl("empty_strided", empty_strided, "CUDA")


def _making(card: Card, plain: Callable[..., Tensor], *, computed: bool) -> Callable[..., Tensor]:
    def make(*args: Any, device: Any = None, **named: Any) -> Tensor:
        device = _named_by_context() if device is None else device
        if not _is_cuda(device):
            return plain(*args, device=device, **named)
        if args and isinstance(args[0], CardTensor):
            return args[0].to(**named)
        made = plain(*args, device="cpu", **named)
        return card.computed(made) if computed else card.upload(made)

    return make


def _locking(card: Card, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty(*size: Any, pin_memory: bool = False, device: Any = None, **named: Any) -> Tensor:
        made = plain(*size, device=_named_by_context() if device is None else device, **named)
        if pin_memory:
            with card.lock:
                card.memory.keep_locked(made)
        return made

    return empty


def _moving(card: Card, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(self: Tensor, *args: Any, copy: bool = False, **named: Any) -> Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **named)
        if not _is_cuda(device):
            return plain(self, *args, copy=copy, **named)
        if isinstance(self, CardTensor):
            return self if dtype in (None, self.dtype) and not copy else plain(self, dtype or self.dtype, copy=copy)
        return card.upload(self if dtype is None else plain(self, dtype), non_blocking=non_blocking)

    return to


def _generators(plain: Any) -> type:
    class Generator:
        """Makes a generator on the host, because the host computes the random numbers."""

        def __new__(cls, device: object = "cpu") -> Any:
            return plain()

    return Generator


def _named_by_context() -> torch.device | None:
    """The device of the innermost `with torch.device(...)`. torch does not apply it to stand-ins for its functions."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
