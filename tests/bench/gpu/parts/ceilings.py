"""The measured limits of this card: copy bandwidth, matmul rate, and the link to the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 5
_WARM_S = 1.0
"""An idle card takes part of a second to raise its clocks; ceilings measured before that would be too low."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates."""

    copy_bytes_per_s: float
    """Device to device, counting bytes read and bytes written: by a kernel or by the driver's copy, whichever is
    faster. On an H200 the driver's copy reaches two thirds of the memory's rate (NVIDIA/cccl issue 1672)."""
    matmul_flops_per_s: float
    """A large square product of normal random numbers in the model's type; zeros would be faster."""
    up_bytes_per_s: float
    """Page-locked host memory to the device."""
    down_bytes_per_s: float


def timed_s(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call on the device: the median of rounds of `repeats` calls, after a warm-up round.

    An uncounted call precedes each round, because the first launch on an idle device takes about 20 us by itself.
    """
    times = []
    for _ in range(ROUNDS + 1):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            work()
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / repeats)
        else:
            start_s = time.perf_counter()
            for _ in range(repeats):
                work()
            times.append((time.perf_counter() - start_s) / repeats)
    return float(statistics.median(times[1:]))


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, copy_bytes: int, matmul_size: int) -> Ceilings:
    """Measure the rates. `copy_bytes`: several times the device's last-level cache, divisible by 4; `matmul_size`: rows
    and columns of the product."""
    a, b = (torch.randn((matmul_size, matmul_size), device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    if device.type == "cuda":
        until_s = time.monotonic() + _WARM_S
        while time.monotonic() < until_s:
            torch.matmul(a, b, out=out)
            torch.cuda.synchronize(device)
    # This comes before the copies: after them the card would be cool, and for a moment faster than in a long prompt.
    matmul_s = timed_s(device, lambda: torch.matmul(a, b, out=out), 10)
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    words = source.view(torch.int32), target.view(torch.int32)
    copy_s = min(
        timed_s(device, lambda: target.copy_(source), 10),
        timed_s(device, lambda: torch.bitwise_not(words[0], out=words[1]), 10),
    )
    host = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    down_s = timed_s(device, lambda: host.copy_(source, non_blocking=True), 2)
    up_s = timed_s(device, lambda: target.copy_(host, non_blocking=True), 2)
    return Ceilings(2 * copy_bytes / copy_s, 2 * matmul_size**3 / matmul_s, copy_bytes / up_s, copy_bytes / down_s)
