"""The emulated card does what a card may do, and shows mistakes of programs that only work by luck."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.packing import Downloads, Uploads
from tests.emulated_card.card import Card
from tests.emulated_card.face import stand_in
from tests.emulated_card.streams import Schedule, Streams
from tests.emulated_card.tensor import CardTensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
TOTAL = 1 << 20


@pytest.fixture(params=list(Schedule), ids=lambda schedule: schedule.value)
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    made = Card(TOTAL, request.param)
    stand_in(made, monkeypatch.setattr)
    yield made
    gc.collect()


lazy = pytest.mark.parametrize("card", [Schedule.LAZY], indirect=True)


def test_what_is_computed_is_what_the_host_computes(card: Card) -> None:
    host = torch.randn((6, 5))
    there = host.cuda()
    assert there.device == torch.device("cuda", 0)
    chosen = torch.tensor([4, 0], device="cuda")
    there[1] = 3.0
    there[2:4, 1:].mul_(2)
    there[chosen] = there[chosen] + 1
    result = (there.t() @ there).softmax(-1)[:, None].topk(2)
    host[1] = 3.0
    host[2:4, 1:].mul_(2)
    host[[4, 0]] += 1
    expected = (host.t() @ host).softmax(-1)[:, None].topk(2)
    assert torch.equal(result.values.cpu(), expected.values)
    assert result.indices.tolist() == expected.indices.tolist()
    assert there.sum().item() == pytest.approx(host.sum().item(), rel=1e-5)


def test_shapes_and_types_need_no_wait(card: Card) -> None:
    card.waiting_fails = True
    x = torch.arange(12, device="cuda").view(3, 4).to(torch.float32).t()
    assert (tuple(x.shape), x.stride(), x.dtype) == ((4, 3), (1, 4), torch.float32)
    assert torch.zeros((2, 0), device="cuda").numel() == 0
    x[x > 3] = 0
    x.masked_fill_(x > 3, 0)
    x[np.int64(1)].to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    first, locked = torch.zeros((), dtype=torch.int64, device="cuda"), torch.empty((4, 6), pin_memory=True)
    waits: tuple[Callable[[], object], ...] = (
        *(x.cpu, x.tolist, x.sum().item, torch.cuda.Stream().synchronize),
        *(lambda: x[x > 3], lambda: x[torch.tensor([1])], lambda: x[first]),
        *(lambda: x.__setitem__(x > 3, x[0]), lambda: x.masked_fill_(x > 3, x[0, 0])),
        lambda: locked[:, :3].copy_(x, non_blocking=True),  # not in one piece: goes through memory that is not locked
    )
    for wait in waits:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            wait()


def test_dimensions_stay_in_their_order_over_the_link(card: Card) -> None:
    turned = torch.arange(6).view(2, 3).t()
    assert turned.cuda().stride() == turned.cuda().cpu().stride() == (1, 3)
    assert torch.equal(turned.cuda().cpu(), turned)
    assert turned[:, ::2].cuda().is_contiguous()


@lazy
def test_what_is_fetched_without_blocking_comes_later(card: Card) -> None:
    fetched = torch.ones(2, device="cuda").to("cpu", torch.float64, non_blocking=True)
    assert str(fetched.tolist()) == "[nan, nan]"
    torch.cuda.synchronize()
    assert fetched.tolist() == [1, 1]


def test_tensors_are_made_on_the_device_of_the_context(card: Card) -> None:
    makers = (torch.empty, torch.zeros, torch.ones, torch.randn, torch.arange, lambda n: torch.tensor([n]))
    for name in ("cuda:0", "cpu"):
        with torch.device(name):
            assert {make(3).device for make in makers} == {torch.device(name)}
            assert torch.empty(3, device="cpu").device == torch.device("cpu")


def test_host_and_card_do_not_mix(card: Card) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device, but found cuda:0 and cpu"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_memory_is_counted_and_bounded(card: Card) -> None:
    free, total = torch.cuda.mem_get_info()
    assert free == total == TOTAL
    x = torch.empty(1000, dtype=torch.uint8, device="cuda")
    view = x[10:20]
    del x
    assert torch.cuda.memory_allocated() == 1024
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(TOTAL, dtype=torch.uint8, device="cuda")
    del view
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.mem_get_info()[0] == TOTAL - 1024
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == TOTAL
    assert torch.cuda.max_memory_reserved() == 1024


def side_stream(work: Callable[[], torch.Tensor], *, waits: bool) -> list[float]:
    """Return what the current stream reads of another stream's result. `waits`: whether it waits for that stream."""
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        found = work()
        done.record()
    if waits:
        done.wait()
    return found.cpu().tolist()


def test_a_stream_that_waits_for_another_reads_what_that_wrote(card: Card) -> None:
    assert side_stream(lambda: torch.ones(2, device="cuda"), waits=True) == [1, 1]


@lazy
def test_a_stream_that_does_not_wait_reads_what_was_there_before(card: Card) -> None:
    assert str(side_stream(lambda: torch.ones(2, device="cuda"), waits=False)) == "[nan, nan]"


@lazy
def test_memory_given_back_is_the_next_ones_on_its_own_stream(card: Card) -> None:
    """If another stream still reads the memory, the stream that frees it must wait first, which it does not do here."""
    side = torch.cuda.Stream()
    x = torch.ones(2, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = x * 2
    del x
    torch.cuda.Event().record()
    card.finish(card.current)
    with torch.cuda.stream(side):
        assert str(late.cpu().tolist()) == "[nan, nan]"


@lazy
@pytest.mark.parametrize(("waits", "expected"), [(True, 2), (False, 14)])
def test_memory_given_back_is_written_by_its_next_user(card: Card, waits: bool, expected: int) -> None:
    """The current stream still reads the freed memory. Another stream, which fills it anew, must wait for that read."""
    x = torch.ones(2, device="cuda")
    torch.cuda.synchronize()
    doubled, read, side = x * 2, torch.cuda.Event(), torch.cuda.Stream()
    address = x.data_ptr()
    del x
    again = torch.empty(2, device="cuda")
    assert again.data_ptr() == address
    read.record()
    with torch.cuda.stream(side):
        if waits:
            read.wait()
        again.fill_(7)
    side.synchronize()
    assert doubled.tolist() == [expected] * 2


def test_an_event_recorded_again_is_waited_for_as_it_was(card: Card) -> None:
    event, x, side = torch.cuda.Event(), torch.zeros(2, device="cuda"), torch.cuda.Stream()
    event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.fill_(1)
        event.record()
    event.wait()
    x.add_(1)
    event.record()
    event.synchronize()
    assert data_of(x).tolist() == [2, 2]


def test_an_event_is_passed_when_what_is_before_it_is_done(card: Card) -> None:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    x = torch.zeros(4, device="cuda")
    x += 1
    after.record()
    while not after.query():
        pass
    assert before.query()
    assert before.elapsed_time(after) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        before.elapsed_time(torch.cuda.Event())


def test_a_graph_does_its_work_again_at_the_same_addresses(card: Card) -> None:
    x, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out.copy_(x * 2 + out)
        with torch.cuda.stream(stream):
            out.add_(1)
    assert out.tolist() == [0, 0, 0]
    graph.replay()
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [14, 14, 14]


@lazy
def test_a_graph_that_runs_reads_what_another_stream_writes_to_its_inputs(card: Card) -> None:
    x, first, second = torch.ones((), device="cuda"), *torch.zeros((2, 1), device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        first.copy_(x)
        second.copy_(x)
    graph.replay()
    card.streams.tick()
    with torch.cuda.stream(side):
        x.fill_(7)
    side.synchronize()
    assert (first.item(), second.item()) == (1, 7)


def test_a_wait_is_refused_while_a_stream_is_captured(card: Card) -> None:
    x, event, stream = torch.ones(3, device="cuda"), torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    waits = (x.cpu, event.query, event.synchronize, event.wait, event.record, stream.synchronize)
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
    with capture, ThreadPoolExecutor() as other_thread:
        other_thread.submit(event.query).result()
        other_thread.submit(x.cpu).result()
        for wait in (*waits, torch.cuda.synchronize):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                wait()
        for wait in (stream.synchronize, torch.cuda.synchronize):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                other_thread.submit(wait).result()
    event.synchronize()


@pytest.mark.parametrize("shares", [True, False])
def test_graphs_of_one_pool_overwrite_each_others_memory(card: Card, shares: bool) -> None:
    """They do not overwrite other memory, which was freed during the capture or allocated since."""
    pools = [torch.cuda.graph_pool_handle()] * 2 if shares else [None, None]
    graphs, x, given_back = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], torch.ones(3, device="cuda"), []
    stream, outs = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        given_back.append(torch.empty(3, device="cuda"))
    works: list[Callable[[], torch.Tensor]] = [lambda: (x + 1) * 2, lambda: x * 4]
    for graph, pool, work in zip(graphs, pools, works, strict=True):
        with torch.cuda.graph(graph, pool, stream):
            given_back.clear()
            outs.append(work())  # the second graph gets the memory of x + 1
    with torch.cuda.stream(stream):
        others = [torch.full((3,), 5.0, device="cuda") for _ in range(4)]
        for graph in reversed(graphs):
            graph.replay()
        assert outs[0].tolist() == [4, 4, 4]
        assert (outs[1].tolist() == [4, 4, 4]) == (not shares)
        assert [one.tolist() for one in others] == [[5, 5, 5]] * 4


def test_an_error_stays(card: Card) -> None:
    table = torch.zeros((3, 2), device="cuda")
    with pytest.raises(IndexError):
        table.index_select(0, torch.tensor([7], device="cuda")).cpu()
    with pytest.raises(IndexError):
        torch.cuda.synchronize()


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values without waiting for work that is still to be done on it."""
    assert isinstance(tensor, CardTensor)
    return tensor.data_here


@triton.jit  # type: ignore[untyped-decorator]
def _double(x: Any, out: Any, n: Any, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@lazy
def test_kernels_wait_for_their_turn(card: Card) -> None:
    x, out = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
    _double[(1,)](x, out, 5, N=8, launch_pdl=True)
    assert data_of(out).isnan().all()
    x.fill_(3)
    assert out.tolist() == [0, 0, 0, 0, 0]
    for others in ((x, torch.zeros(5)), (torch.zeros(5), torch.zeros(5))):
        with pytest.raises(ValueError, match="cpu tensor"):
            _double[(1,)](*others, 5, N=8)


class NeverWaits(CudaDevice):
    """Mutant: a buffer is read, or written again, although the device may not have finished with it."""

    def event(self):  # type: ignore[no-untyped-def]
        made = super().event()
        made.wait = lambda: None  # type: ignore[method-assign]
        return made


@lazy
@pytest.mark.parametrize(("device", "sound"), [(CudaDevice, True), (NeverWaits, False)])
def test_a_ring_of_page_locked_buffers_that_does_not_wait_is_found(
    card: Card, device: type[CudaDevice], sound: bool
) -> None:
    runs_on = device(torch.device("cuda", 0))
    uploads, downloads = Uploads(runs_on, buffers=2, first_bytes=64), Downloads(runs_on, buffers=8, first_values=4)
    with runs_on.use():
        sent = [uploads.send([np.full(3, i, dtype=np.int32)]).views[0] for i in range(5)]
        landed = [downloads.fetch(one) for one in sent]
        runs_on.event().wait()
    assert ([one.tolist() for one in landed] == [[i] * 3 for i in range(5)]) == sound


@given(st.data())
def test_any_schedule_gives_what_the_order_says(data: st.DataObject) -> None:
    """Pieces of one stream are done in order. Events order pieces of several streams."""
    streams = Streams(data.draw(st.sampled_from(Schedule)), data.draw(st.integers(0, 9)))
    made = [streams.add() for _ in range(3)]
    done: list[int] = []
    before: list[set[int]] = []
    """For each piece, the pieces that must be done before it."""
    behind: dict[int, set[int]] = {i: set() for i in range(3)}
    for piece in range(data.draw(st.integers(1, 12))):
        i, other = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            streams.put(made[i], streams.mark(made[other]).reach)
            behind[i] |= behind[other]
        before.append(set(behind[i]))
        streams.put(made[i], partial(done.append, piece))
        behind[i] |= {piece}
        if data.draw(st.booleans()):
            streams.tick()
    streams.finish()
    assert sorted(done) == list(range(len(before)))
    for place, piece in enumerate(done):
        assert before[piece] <= set(done[:place])


def test_idle_streams_leave_the_random_schedule_as_busy() -> None:
    streams, done = Streams(Schedule.RANDOM), 0
    busy, _ = streams.add(), [streams.add() for _ in range(200)]

    def count() -> None:
        nonlocal done
        done += 1

    for _ in range(100):
        streams.put(busy, count)
    assert done > 50
