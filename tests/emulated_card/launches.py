"""Triton's kernels on the emulated card: the interpreter computes a launch when its stream gets to it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.interpreter import GridExecutor

from tests.emulated_card.card import Card, on_host
from tests.emulated_card.tensor import CardTensor

_OPTIONS = ("launch_pdl",)
"""Launch options that the interpreter does not have."""


def stand_in_for_launches(card: Card, capability: tuple[int, int], patch: Callable[[Any, str, Any], None]) -> None:
    """Put every launch on the current stream. Triton's driver reports a card of this compute capability."""
    target = SimpleNamespace(backend="cuda", arch=10 * capability[0] + capability[1], warp_size=32)
    patch(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: target))
    interpret = GridExecutor.__call__

    def launch(self: Any, *args: Any, **named: Any) -> None:
        tensors = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        if not all(isinstance(tensor, CardTensor) for tensor in tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        given = on_host(args)
        by_name = {name: on_host(one) for name, one in named.items() if name not in _OPTIONS}
        if "EARLY" in by_name:
            by_name["EARLY"] = False  # the interpreter does not have a card's instructions
        if "WIDE" in by_name:  # the interpreter multiplies bfloat16 as bit patterns
            by_name["WIDE"] = any(tensor.dtype == torch.bfloat16 for tensor in tensors)
        card.put(lambda: interpret(self, *given, **by_name))

    patch(GridExecutor, "__call__", launch)
