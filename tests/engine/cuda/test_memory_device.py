"""`CudaDevice`'s use of torch's and the driver's memory counters, with fake counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backend.cuda.device import CudaDevice, CudaEvent


class Counters:
    """A card of 100 bytes: what torch has in use, what it keeps for later, and what libraries took."""

    def __init__(self) -> None:
        self.used, self.cached, self.libraries, self.peak = 20, 10, 5, 0

    @property
    def reserved(self) -> int:
        return self.used + self.cached

    def take(self, size: int) -> None:
        """Allocate like the caching allocator: first from the kept memory."""
        from_cache = min(size, self.cached)
        self.used, self.cached = self.used + size, self.cached - from_cache
        self.peak = max(self.peak, self.reserved)

    def give(self, size: int) -> None:
        self.used, self.cached = self.used - size, self.cached + size

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.reserved


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    card = Counters()
    stand_ins = {
        "Stream": lambda device: SimpleNamespace(synchronize=lambda: None),
        "graph_pool_handle": lambda: (0, 0),
        "memory_reserved": lambda device: card.reserved,
        "memory_allocated": lambda device: card.used,
        "max_memory_reserved": lambda device: card.peak,
        "reset_peak_memory_stats": card.reset_peak,
        "empty_cache": card.empty_cache,
        "mem_get_info": lambda device: (100 - card.reserved - card.libraries, 100),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return card


def test_what_torch_keeps_unused_counts_as_free(counters: Counters) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    assert (device.free_bytes(), device.total_bytes()) == (75, 100)
    counters.take(4)
    assert device.free_bytes() == 71
    counters.empty_cache()
    assert device.free_bytes() == 71


def test_the_peak_is_what_work_needed_at_once_and_what_libraries_kept(counters: Counters) -> None:
    def work() -> None:
        counters.take(30)
        counters.give(20)
        counters.take(5)
        counters.libraries += 7
        counters.give(15)

    device = CudaDevice(torch.device("cuda", 0))
    assert device.peak_bytes(work) == 30 + 7
    assert device.free_bytes() == 75 - 7
    assert device.peak_bytes(lambda: counters.take(12)) == 12


def test_a_wait_for_an_event_names_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thread that never named a card would open a context, and take its memory, on the first card."""
    current: list[torch.device] = []
    waited: list[torch.device] = []

    @contextmanager
    def use(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: waited.append(current[-1]))
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    monkeypatch.setattr(torch.cuda, "device", use)
    stream: Any = SimpleNamespace(device=torch.device("cuda", 1))
    CudaEvent(stream).wait()
    assert waited == [stream.device]
    assert current == []
