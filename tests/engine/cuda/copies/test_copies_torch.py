"""The same copier over real memory: demoted blocks come back bit for bit."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda import copies
from engine.backend.cuda.copies import CudaCopyEngine, PageLockedPool
from engine.backend.host_memory import BothSides, CpuBlockMover, HostMemoryError, HostPool
from engine.tiers.copies.base import BlockPair, CopyEngine, CopyError, Direction
from engine.tiers.copies.copier import BlockCopier, CopyLimits
from engine.tiers.stores.measure import drain, measure_rates
from engine.tiers.stores.threads import ThreadedCopies
from tests.engine.cuda.copies.copy_script import ScriptedEngine

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS, SLOTS = 11, 9


def random_pool(dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Return random bit patterns, including NaN: [block, layer, 2, slot, kv_head, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, 2, 2, 4, 1, 6)
    integers = torch.randint(0, 256, (*shape[:-1], 6 * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return integers.view(dtype).to(device)


@contextmanager
def host_and_engine(pool: torch.Tensor, slots: int) -> Iterator[tuple[HostPool, CopyEngine]]:
    """The memory and the copy engine that the host tier uses for the pool's device."""
    if pool.device.type == "cuda":
        with closing(PageLockedPool(pool, slots)) as locked:
            yield locked, CudaCopyEngine(pool, locked)
    else:
        host = HostPool(pool, slots)
        with closing(ThreadedCopies(CpuBlockMover(pool, host), "test")) as engine:
            yield host, engine


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@given(st.sampled_from(DTYPES), st.integers(1, SLOTS), st.integers(0, 99), st.integers(1, 3))
def test_a_round_trip_keeps_every_bit(device: str, dtype: torch.dtype, count: int, seed: int, run: int) -> None:
    """Blocks go down, the pool is poisoned, and the blocks come back elsewhere unchanged. Nothing else is written."""
    pool = random_pool(dtype, device, seed)
    before = bits(pool).clone()
    chosen = random.Random(seed)
    down, slots = chosen.sample(range(BLOCKS), count), chosen.sample(range(SLOTS), count)
    up = chosen.sample(range(BLOCKS), count)
    with host_and_engine(pool, SLOTS) as (host, engine):
        copier = BlockCopier(engine, time.monotonic, CopyLimits(job_bytes=run * host.slot_bytes))
        copier.demote([BlockPair(b, s) for b, s in zip(down, slots, strict=True)])
        assert len(drain(copier, 10)[0].done) == count
        pool.fill_(torch.nan)
        poison = bits(pool).clone()
        copier.promote([BlockPair(s, b) for s, b in zip(slots, up, strict=True)])
        assert len(drain(copier, 10)[0].done) == count
    after = bits(pool)
    for block in range(BLOCKS):
        expected = before[down[up.index(block)]] if block in up else poison[block]
        assert torch.equal(after[block], expected), block


@pytest.mark.parametrize("device", DEVICES)
def test_rates_of_both_directions_are_measured(device: str) -> None:
    pool = torch.zeros((8, 1 << 16), device=device)
    with host_and_engine(pool, 8) as (_, engine):
        copier = BlockCopier(engine, time.monotonic)
        measure_rates(copier, 8, deadline_s=30)
    assert all((copier.bytes_per_s(direction) or 0) > 0 for direction in Direction)
    assert copier.open_copies == 0


def test_a_copy_that_fails_while_measuring_is_an_error() -> None:
    engine = ScriptedEngine(4, 4, refuses=True)
    with pytest.raises(CopyError, match="the link is down"):
        measure_rates(BlockCopier(engine, time.monotonic), 4, deadline_s=10)


def test_a_copy_that_never_ends_is_not_waited_for_longer_than_told() -> None:
    engine, times = ScriptedEngine(4, 4), iter(range(100))
    copier = BlockCopier(engine, lambda: 0.0)
    copier.demote([BlockPair(0, 0)])
    with pytest.raises(TimeoutError, match="1 copies of KV blocks have not ended within 5 s"):
        drain(copier, 5, clock=lambda: next(times))


def test_what_does_not_fit_is_refused() -> None:
    pool = torch.zeros((4, 2, 8))
    with pytest.raises(ValueError, match="needs at least 1 slot, got 0"):
        HostPool(pool, 0)
    with pytest.raises(ValueError, match="as large as a host slot"):
        CpuBlockMover(torch.zeros((4, 2, 9)), HostPool(pool, 1))
    with pytest.raises(ValueError, match="contiguous"):
        CpuBlockMover(torch.zeros((4, 8, 2)).transpose(1, 2), HostPool(pool, 1))
    with pytest.raises(HostMemoryError, match=r"of 4503599627370496 blocks of 64 bytes .* lower its size"):
        HostPool(pool, 1 << 52)


@dataclass
class FakeStream:
    """A stand-in for a CUDA stream: a list of the recorded work."""

    queued: list[str] = field(default_factory=list)


@dataclass
class FakeEvent:
    """An event that passes when the test says so, 3 ms after the event before it."""

    streams: list[FakeStream]
    current: list[torch.device]
    fails: bool = False
    passed: bool = False

    def record(self, stream: FakeStream) -> None:
        stream.queued.append("event")
        self.streams.append(stream)

    def query(self) -> bool:
        assert self.current, "the thread has not chosen a card"
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.passed

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.passed
        assert other.passed
        return 3.0


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Fake `torch.cuda.device`; the list has the cards that it currently names."""
    named: list[torch.device] = []

    @contextmanager
    def name(device: torch.device) -> Iterator[None]:
        named.append(device)
        yield
        named.pop()

    monkeypatch.setattr(torch.cuda, "device", name)
    return named


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, current: list[torch.device]) -> list[FakeEvent]:
    """Fake CUDA's streams and events; the list has all events in order of creation."""
    made: list[FakeEvent] = []

    def event(enable_timing: bool) -> FakeEvent:
        assert enable_timing
        made.append(FakeEvent([], current))
        return made[-1]

    @contextmanager
    def stream(stream: FakeStream) -> Iterator[None]:
        stream.queued.append("copies from here")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return made


def test_runs_lie_between_two_events_of_their_directions_stream(events: list[FakeEvent]) -> None:
    pool = random_pool(torch.bfloat16, "cpu", 1)
    host = HostPool(pool, SLOTS)
    copier = BlockCopier(CudaCopyEngine(pool, host), time.monotonic)
    copier.demote([BlockPair(0, 0), BlockPair(1, 1)])
    copier.promote([BlockPair(5, 7)])
    (down,), (also_down,), (up,), (also_up,) = (event.streams for event in events)
    assert down is also_down
    assert up is also_up
    assert down is not up
    assert down.queued == up.queued == ["copies from here", "event", "event"]
    assert copier.poll() == []
    for event in events:
        event.passed = True
    assert [len(end.done) for end in copier.poll()] == [2, 1]
    assert copier.bytes_per_s(Direction.DEMOTE) == pytest.approx(2 * host.slot_bytes / 3e-3)
    assert torch.equal(host.data[:2], bits(pool)[:2].view(2, -1))
    assert torch.equal(bits(pool)[7].view(-1), host.data[5])


def test_an_error_of_the_card_ends_the_copy(events: list[FakeEvent]) -> None:
    pool = random_pool(torch.bfloat16, "cpu", 1)
    copier = BlockCopier(CudaCopyEngine(pool, HostPool(pool, SLOTS)), time.monotonic)
    copier.demote([BlockPair(0, 0)])
    events[1].fails = True
    (end,) = copier.poll()
    assert (end.done, end.error) == ((), "CUDA error: an illegal memory access was encountered")


@dataclass
class FakeCudart:
    """A stand-in that registers memory, or refuses."""

    status: int
    current: list[torch.device]
    registered: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert self.current == [OnCard.device]
        if not self.status:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        assert self.current == [OnCard.device]
        del self.registered[address]
        return 0


class OnCard:
    """A pool that claims to be on a card."""

    device = torch.device("cuda", 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.empty((2, 8))


def test_memory_of_a_cards_tier_is_page_locked_and_let_go(
    monkeypatch: pytest.MonkeyPatch, current: list[torch.device]
) -> None:
    cudart = FakeCudart(0, current)
    monkeypatch.setattr(copies, "_cudart", lambda: cudart)
    pool: Any = OnCard()
    host = PageLockedPool(pool, 3)
    assert cudart.registered == {host.data.data_ptr(): 3 * 64}
    host.close()
    host.close()
    assert cudart.registered == {}
    monkeypatch.setattr(copies, "_cudart", lambda: FakeCudart(2, current))
    with pytest.raises(HostMemoryError, match=r"3 blocks of 64 bytes \(192 bytes\) cannot be page-locked .*ulimit -l"):
        PageLockedPool(pool, 3)
    assert current == []


def test_memory_that_nobody_closed_is_let_go_with_its_last_user(
    monkeypatch: pytest.MonkeyPatch, current: list[torch.device]
) -> None:
    """If registered memory were freed, the next registration at its address would fail. A copy engine outlives the
    pool's object if its owner keeps only the engine."""
    cudart = FakeCudart(0, current)
    monkeypatch.setattr(copies, "_cudart", lambda: cudart)
    pool: Any = OnCard()
    host = PageLockedPool(pool, 3)
    memory = BothSides(torch.empty((2, 2, 8)), host)
    del host
    gc.collect()
    assert len(cudart.registered) == 1
    del memory
    gc.collect()
    assert cudart.registered == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_promotion_runs_beside_computing() -> None:
    """While the device computes on the current stream, a promotion begins and ends."""
    pool = torch.zeros((4, 1 << 22), device="cuda")
    host = PageLockedPool(pool, 4)
    copier = BlockCopier(CudaCopyEngine(pool, host), time.monotonic)
    measure_rates(copier, 4, deadline_s=30)
    matrix = torch.randn((8192, 8192), device="cuda")
    busy = torch.cuda.Event()
    for _ in range(200):
        matrix = matrix @ matrix * 1e-4
    busy.record()
    copier.promote([BlockPair(i, i) for i in range(4)])
    drain(copier, 30)
    assert not busy.query(), "the copy waited for the compute stream"
    torch.cuda.synchronize()
    host.close()
