"""Stand-ins for the functions and classes of `torch.cuda` while the emulated card is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.emulated_card.card import Card, Recording
from tests.emulated_card.creation import stand_in_for_creation
from tests.emulated_card.launches import stand_in_for_launches
from tests.emulated_card.memory import Pool
from tests.emulated_card.streams import Mark

CAPABILITY = (9, 0)
_MULTIPROCESSORS = 132
_GRAPH_BYTES = 1 << 16
"""Bytes of memory that a graph takes."""
_NOT_REGISTERED, _ALREADY_REGISTERED = 713, 712
"""CUDA's numbers for these errors."""
Patch = Callable[[Any, str, Any], None]
"""Puts a value in the place of an object's attribute, as `setattr` and pytest's `monkeypatch.setattr` do."""


def stand_in(card: Card, patch: Patch) -> None:
    """Make the card this process's only device, for `torch.cuda`, for torch's functions that make tensors and for
    Triton's interpreter. Call this before importing modules that import names from torch.cuda or Triton."""
    stand_in_for_creation(card, patch)
    stand_in_for_launches(card, CAPABILITY, patch)
    for name, value in (_figures(card) | _work(card)).items():
        patch(torch.cuda, name, value)


def _figures(card: Card) -> dict[str, Any]:
    """Functions that report on the card."""
    memory = card.memory
    properties = SimpleNamespace(
        name="an emulated card",
        total_memory=memory.total,
        multi_processor_count=_MULTIPROCESSORS,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
    )

    def settled(figure: Callable[[], Any]) -> Callable[..., Any]:
        def tell(device: object = None) -> Any:
            with card.lock:
                card.take_back()
                return figure()

        return tell

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": settled(lambda: (memory.total - memory.reserved, memory.total)),
        "memory_allocated": settled(lambda: memory.allocated),
        "memory_reserved": settled(lambda: memory.reserved),
        "max_memory_allocated": settled(lambda: memory.max_allocated),
        "max_memory_reserved": settled(lambda: memory.max_reserved),
        "reset_peak_memory_stats": settled(memory.reset_peaks),
        "empty_cache": settled(memory.empty_cache),
    }


def _work(card: Card) -> dict[str, Any]:
    """Classes and functions that launch, order and await work."""

    @contextmanager
    def device(which: object) -> Iterator[None]:
        yield

    def set_sync_debug_mode(mode: str) -> None:
        card.waiting_fails = mode == "error"

    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: card.finish(),
        "cudart": _cudart(card),
        "device": device,
        "set_sync_debug_mode": set_sync_debug_mode,
        **_streams(card),
    }


def _streams(card: Card) -> dict[str, Any]:
    """Streams, events, and graphs that are recorded on streams."""

    class Stream:
        def __init__(self, device: object = None, priority: int = 0) -> None:
            self.device = card.device
            self.queue = card.streams.add()

        def synchronize(self) -> None:
            card.wait("synchronizing", self.queue)

        def wait_event(self, event: Event) -> None:
            event.wait(self)

        def wait_stream(self, stream: Stream) -> None:
            card.put_behind(card.mark(stream.queue), self.queue)

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self._timed = enable_timing
            self._mark: Mark | None = None

        def record(self, stream: Stream | None = None) -> None:
            self._mark = card.mark(stream.queue if stream else None)

        def wait(self, stream: Stream | None = None) -> None:
            if self._mark is not None:
                card.put_behind(self._mark, stream.queue if stream else None)

        def query(self) -> bool:
            return self._mark is None or card.has_passed(self._mark)

        def synchronize(self) -> None:
            if self._mark is not None:
                card.reach(self._mark)

        def elapsed_time(self, end_event: Event) -> float:
            if not (self._timed and end_event._timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            marks = self._mark, end_event._mark
            if not all(mark is not None and mark.passed for mark in marks):
                raise RuntimeError("CUDA error: device not ready")
            start_s, end_s = (mark.at_s for mark in marks if mark is not None)
            assert start_s is not None
            assert end_s is not None
            return 1e3 * (end_s - start_s)

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, card.current = card.current, stream.queue
        try:
            yield
        finally:
            card.current = before

    return {"Stream": Stream, "Event": Event, "stream": on_stream, **_graphs(card, Stream, on_stream)}


def _graphs(card: Card, new_stream: Callable[[], Any], on_stream: Callable[[Any], Any]) -> dict[str, Any]:
    """Graphs. `on_stream`: makes a stream the current one during a block."""

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self.recording = Recording(Pool())
            self.memory = card.allocate(_GRAPH_BYTES)

        def replay(self) -> None:
            card.launch(self.recording)

    @contextmanager
    def graph(
        cuda_graph: CUDAGraph,
        pool: Pool | None = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        stream, cuda_graph.recording.pool = stream or new_stream(), pool or Pool()
        card.finish()
        torch.cuda.empty_cache()
        with on_stream(stream):
            card.capture(stream.queue, cuda_graph.recording)
            try:
                yield
            finally:
                card.end_capture(stream.queue)

    return {"graph_pool_handle": Pool, "CUDAGraph": CUDAGraph, "graph": graph}


def _cudart(card: Card) -> type:
    """The runtime's own functions."""

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            with card.lock:
                return 0 if card.memory.lock_pages(address, size) else _ALREADY_REGISTERED

        def cudaHostUnregister(self, address: int) -> int:
            with card.lock:
                return 0 if card.memory.unlock_pages(address) else _NOT_REGISTERED

    return Cudart
