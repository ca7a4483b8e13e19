"""What the backend asks of a device: a stream, events, page-locked memory, graphs, and how much memory is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the order of the device's work."""

    def wait(self) -> None:
        """Block this thread until the device has come here."""

    def seconds_to(self, later: Event) -> float:
        """Time on the device from here to `later`; both have been waited for."""


class Graph(Protocol):
    """Work recorded once and launched as one piece; it reads and writes the same addresses every time."""

    def replay(self) -> None:
        """Launch it."""


class Device(Protocol):
    """One device with one stream: what is launched runs in that order, and launching does not wait for it."""

    @property
    def torch(self) -> torch.device:
        """Where tensors go."""

    def use(self) -> AbstractContextManager[None]:
        """Within it, this thread launches on the device's stream, in inference mode."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Host memory that the device copies without the CPU's help: uint8 [size_bytes]."""

    def event(self) -> Event:
        """The point behind all that was launched so far."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches; nothing runs. All graphs share one pool for the memory they allocate."""

    def synchronize(self) -> None:
        """Block until all that was launched has run."""

    def free_bytes(self) -> int:
        """Memory that nobody uses, what torch has set aside for itself and does not use included."""

    def total_bytes(self) -> int:
        """All of the device's memory."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Do `work`; how much more memory than before it used at the worst moment."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one in whose wake it was raised, is a lack of device memory. The driver's and Triton's are
    RuntimeErrors with such a text, and ending a capture that has failed raises once more, of something else."""
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
        """See `Event.wait`; the interpreter lock is free meanwhile."""
        with torch.cuda.device(self._device):  # a thread that named no card would open a context on the first one
            self.event.synchronize()

    def seconds_to(self, later: Event) -> float:
        """See `Event.seconds_to`."""
        assert isinstance(later, CudaEvent)
        return float(self.event.elapsed_time(later.event)) / 1e3


class CudaDevice:
    """`Device` by CUDA. `stream` is for those who order other streams against it."""

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
        # thread_local: copies that other threads launch meanwhile are none of this graph's business.
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
        """See `Device.peak_bytes`. What libraries take behind torch's back, and keep, is counted too."""
        self.synchronize()
        torch.cuda.empty_cache()
        driver_before = torch.cuda.mem_get_info(self._device)[0]
        reserved_before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        self.synchronize()
        # Reserved, not allocated: what lies between the pieces is needed as well.
        grown = torch.cuda.max_memory_reserved(self._device) - reserved_before
        held = torch.cuda.memory_reserved(self._device) - reserved_before
        libraries = driver_before - torch.cuda.mem_get_info(self._device)[0] - held
        return grown + max(0, libraries)
