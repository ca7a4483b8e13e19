"""Kernels that are launched before the one before them has ended (programmatic dependent launch, Hopper and later).

A decode step is hundreds of kernels of some microseconds: waiting for the last program of one before the first of the
next is launched would cost a tenth of it. A kernel launched early begins with `follow`, or first does what needs
nothing of the others. See "Programmatic Dependent Launch and Synchronization" in the CUDA C++ programming guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backend.cuda.kernels.attend import is_hopper


@cache
def early(device: torch.device) -> Mapping[str, bool]:
    """What to launch a kernel with on `device`: its EARLY, and the option that goes with it where the card has it."""
    if device.type != "cpu" and is_hopper(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def follow(EARLY: tl.constexpr):
    """All that was launched before has ended, and what it wrote is there; what comes next may be launched.

    Every program calls it, also one that has nothing to do: a kernel that ends without waiting lets the next one
    begin while the one before still writes.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
