"""Where a step's time goes, by kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]

from engine.backend.cuda.backend import CudaBackend
from engine.sched.plan import StepPlan

_KINDS = (
    (
        "attention",
        ("attend", "_add_parts", "_add_tile_parts", "_prefill", "fmha", "flash", "batch_decode", "batch_prefill"),
    ),
    ("rotation and KV store", ("rope_store",)),
    ("norm", ("_norm",)),
    ("activation", ("silu_mul",)),
    ("matrix products", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "xmma", "linear", "mm")),
    ("copies", ("memcpy", "memset", "copy", "cat")),
    (
        "sampling and indexing",
        ("argmax", "sort", "reduce", "softmax", "topk", "index", "gather", "scatter", "embedding"),
    ),
)
"""Kinds by a part of the kernel's name; the first match counts."""


@dataclass(frozen=True, slots=True)
class KernelShare:
    """One kernel, over all its calls in a step."""

    name: str
    kind: str
    seconds: float
    calls: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Time of one step."""

    what: str
    wall_s: float
    """Seconds between the starts of two steps while the profiler runs."""
    kernels: Sequence[KernelShare]
    """Longest first."""

    @property
    def busy_s(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def lost(self) -> float:
        """Return a lower bound of a step's launches that the profiler has missed. Every step launches the same kernels,
        so the true number of each kernel's calls per step is whole. CUPTI before 13.1 drops the first calls of a
        session (pytorch issue 192021).
        """
        return sum(math.ceil(kernel.calls) - kernel.calls for kernel in self.kernels)

    def by_kind(self) -> list[tuple[str, float]]:
        """Return the seconds of each kind, longest first."""
        sums: dict[str, float] = {}
        for kernel in self.kernels:
            sums[kernel.kind] = sums.get(kernel.kind, 0.0) + kernel.seconds
        return sorted(sums.items(), key=lambda item: -item[1])


def kind_of(kernel: str) -> str:
    """Return the part of a step that a kernel of this name belongs to."""
    name = kernel.lower()
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")


def profile_steps(backend: CudaBackend, what: str, plans: Iterable[StepPlan]) -> StepProfile:
    """Run steps one after another on this thread (none may be in flight), so that the profiler sees every launch."""
    from torch.profiler import ProfilerActivity, profile

    on_card = backend.pool.data.device.type == "cuda"
    listed = list(plans)
    backend.step(listed[0])
    activities = [ProfilerActivity.CUDA] if on_card else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        start_s = time.perf_counter()
        for plan in listed[1:]:
            backend.step(plan)
        elapsed_s = time.perf_counter() - start_s
    steps = len(listed) - 1
    kernels = kernel_shares(profiler.events(), steps) if on_card else operation_shares(profiler.key_averages(), steps)
    return StepProfile(what, elapsed_s / steps, kernels)


def kernel_shares(events: Iterable[Any], steps: int) -> list[KernelShare]:
    """Return the kernels among torch's profiler events, per step, longest first; not the operations that launched them.

    A kernel that was launched early waits for the one before it, so its time counts from that kernel's end. Then the
    sum of all times is at most the time in which the card had work. Raises RuntimeError if there are no kernels.
    """
    micros: dict[str, float] = {}
    calls: dict[str, int] = {}
    ended = 0.0
    on_card = (event for event in events if event.device_type == DeviceType.CUDA)
    for event in sorted(on_card, key=lambda event: float(event.time_range.start)):
        end = event.time_range.end
        micros[event.name] = micros.get(event.name, 0.0) + max(0.0, end - max(event.time_range.start, ended))
        calls[event.name] = calls.get(event.name, 0) + 1
        ended = max(ended, end)
    return _shares((name, micros[name], calls[name], steps) for name in micros)


def operation_shares(averages: Iterable[Any], steps: int) -> list[KernelShare]:
    """Return torch's operations on the CPU, for a run without a card. Raises RuntimeError if there are none."""
    return _shares((event.key, event.self_cpu_time_total, event.count, steps) for event in averages)


def _shares(rows: Iterable[tuple[str, float, int, int]]) -> list[KernelShare]:
    shares = [
        KernelShare(name, kind_of(name), micros / 1e6 / steps, calls / steps)
        for name, micros, calls, steps in rows
        if micros > 0
    ]
    if not shares:
        raise RuntimeError("the profiler saw no kernel")
    return sorted(shares, key=lambda kernel: -kernel.seconds)
