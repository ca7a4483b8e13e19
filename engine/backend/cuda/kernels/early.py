"""Launches kernels before the previous kernel has ended (programmatic dependent launch, Hopper and later).

A decode step is hundreds of kernels of some microseconds each. Launching a kernel only after the last program of the
previous one would cost a tenth of the step. A kernel launched early begins with `follow`, or first does work that needs
no other kernel. See "Programmatic Dependent Launch and Synchronization" in the CUDA C++ programming guide.
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
    """Return the arguments to launch a kernel on `device`: EARLY, and the launch option if the card supports it."""
    if device.type != "cpu" and is_hopper(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait until all earlier kernels have ended and their writes are visible; then allow the next kernel's launch.

    Every program must call it, even one with nothing to do: if a kernel ended without waiting, the next kernel could
    begin while the previous one still writes.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
