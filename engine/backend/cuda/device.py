"""The backend's interface to a device: a stream, events, page-locked memory, graphs, and the free memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the order of the device's work."""

    def wait(self) -> None:
        """Block this thread until the device has reached this point."""

    def seconds_to(self, later: Event) -> float:
        """Return the seconds on the device from here to `later`. Wait for both first."""


class Graph(Protocol):
    """Work that is recorded once and launched as one piece. It reads and writes the same addresses every time."""

    def replay(self) -> None:
        """Launch the recorded work."""


class Device(Protocol):
    """One device with one stream: launched work runs in the order of launching, and launching does not wait for it."""

    @property
    def torch(self) -> torch.device:
        """The device for tensors."""

    def use(self) -> AbstractContextManager[None]:
        """Make this thread launch on the device's stream, in inference mode, within the context."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Return page-locked host memory, which the device copies without the CPU: uint8 [size_bytes]."""

    def event(self) -> Event:
        """Record and return the point after all work launched so far."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the launches of `work` without running them. All graphs share one pool for their memory."""

    def synchronize(self) -> None:
        """Block until all launched work has run."""

    def free_bytes(self) -> int:
        """Return the bytes that nobody uses, including torch's unused reserve."""

    def total_bytes(self) -> int:
        """Return the bytes of all the device's memory."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Do `work`, and return the peak of its memory above the memory in use before, in bytes."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or an error in its context, means a lack of device memory. The driver and Triton raise
    RuntimeErrors that say so, and the end of a failed capture raises a further, different error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__context__
    return False


class CudaEvent:
    """`Event` by a CUDA event that lets the waiting thread sleep."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """See `Event.wait`. It releases the interpreter lock."""
        with torch.cuda.device(self._device):  # otherwise a thread would open a context on the first card
            self.event.synchronize()

    def seconds_to(self, later: Event) -> float:
        """See `Event.seconds_to`."""
        assert isinstance(later, CudaEvent)
        return float(self.event.elapsed_time(later.event)) / 1e3


class CudaDevice:
    """`Device` by CUDA. `stream` is public so that other streams can be ordered against it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph_pool = torch.cuda.graph_pool_handle()

    @property
    def torch(self) -> torch.device:
        """See `Device.torch`."""
        return self._device

    @contextmanager
    def use(self) -> Iterator[None]:
        """See `Device.use`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream), torch.inference_mode():
            yield

    def pinned(self, size_bytes: int) -> Tensor:
        """See `Device.pinned`."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> CudaEvent:
        """See `Device.event`."""
        return CudaEvent(self.stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Device.capture`."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: copies that other threads launch meanwhile must not affect the capture.
        with torch.cuda.graph(graph, self._graph_pool, self.stream, capture_error_mode="thread_local"):
            work()
        return graph

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self.stream.synchronize()

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused

    def total_bytes(self) -> int:
        """See `Device.total_bytes`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See `Device.peak_bytes`. Memory that libraries take without torch, and keep, counts too."""
        self.synchronize()
        torch.cuda.empty_cache()
        driver_before = torch.cuda.mem_get_info(self._device)[0]
        reserved_before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        self.synchronize()
        # Reserved, not allocated: the gaps between allocations are needed as well.
        grown = torch.cuda.max_memory_reserved(self._device) - reserved_before
        held = torch.cuda.memory_reserved(self._device) - reserved_before
        libraries = driver_before - torch.cuda.mem_get_info(self._device)[0] - held
        return grown + max(0, libraries)
