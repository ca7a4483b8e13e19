"""The emulated card does what a card may do, and shows what a program does wrong that only goes well by luck."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

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
    for wait in (x.cpu, x.sum().item, lambda: x[x > 3], lambda: x[torch.tensor([1])], x.tolist):
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            wait()


def test_tensors_are_made_where_the_context_says(card: Card) -> None:
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
    """What the current stream reads of what another one has computed, with and without waiting for that."""
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.Stream())
    with torch.cuda.stream(side):
        found = work()
        done.record()
    if waits:
        done.wait()
    return found.cpu().tolist()


def test_who_waits_for_another_stream_reads_what_that_wrote(card: Card) -> None:
    assert side_stream(lambda: torch.ones(2, device="cuda"), waits=True) == [1, 1]


@lazy
def test_who_does_not_wait_reads_what_was_there_before(card: Card) -> None:
    assert str(side_stream(lambda: torch.ones(2, device="cuda"), waits=False)) == "[nan, nan]"


@lazy
def test_memory_given_back_is_the_next_ones_on_its_own_stream(card: Card) -> None:
    """What another stream still reads of it must be waited for before."""
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
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            out.cpu()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            torch.cuda.synchronize()
    assert out.tolist() == [0, 0, 0]
    graph.replay()
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [12, 12, 12]


def test_an_error_stays(card: Card) -> None:
    table = torch.zeros((3, 2), device="cuda")
    with pytest.raises(IndexError):
        table.index_select(0, torch.tensor([7], device="cuda")).cpu()
    with pytest.raises(IndexError):
        torch.cuda.synchronize()


@triton.jit
def _double(x, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@lazy
def test_kernels_wait_for_their_turn(card: Card) -> None:
    x, out = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
    _double[(1,)](x, out, 5, N=8, launch_pdl=True)
    assert out.data_here.isnan().all()
    x.fill_(3)
    assert out.tolist() == [0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="cpu tensor"):
        _double[(1,)](x, torch.zeros(5), 5, N=8)


class NeverWaits(CudaDevice):
    """Mutant: a buffer is written again, or read, whether or not the device has been there."""

    def event(self):  # type: ignore[no-untyped-def]
        made = super().event()
        made.wait = lambda: None  # type: ignore[method-assign]
        return made


@lazy
@pytest.mark.parametrize(("device", "sound"), [(CudaDevice, True), (NeverWaits, False)])
def test_a_ring_of_page_locked_buffers_that_does_not_wait_is_found(
    card: Card, device: type[CudaDevice], sound: bool
) -> None:
    import numpy as np

    runs_on = device(torch.device("cuda", 0))
    uploads, downloads = Uploads(runs_on, buffers=2, first_bytes=64), Downloads(runs_on, buffers=8, first_values=4)
    with runs_on.use():
        sent = [uploads.send([np.full(3, i, dtype=np.int32)]).views[0] for i in range(5)]
        landed = [downloads.fetch(one) for one in sent]
        runs_on.event().wait()
    assert ([one.tolist() for one in landed] == [[i] * 3 for i in range(5)]) == sound


@given(st.data())
def test_any_schedule_gives_what_the_order_says(data: st.DataObject) -> None:
    """Pieces of one stream in order; of several, as far as events order them."""
    streams = Streams(data.draw(st.sampled_from(Schedule)), data.draw(st.integers(0, 9)))
    made = [streams.add() for _ in range(3)]
    done: list[int] = []
    before: list[set[int]] = []
    """For each piece, those that must come before it."""
    behind: dict[int, set[int]] = {i: set() for i in range(3)}
    for piece in range(data.draw(st.integers(1, 12))):
        i, other = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            streams.put(made[i], streams.mark(made[other]).reach)
            behind[i] |= behind[other]
        before.append(set(behind[i]))
        streams.put(made[i], lambda piece=piece: done.append(piece))
        behind[i] |= {piece}
        if data.draw(st.booleans()):
            streams.tick()
    streams.finish()
    assert sorted(done) == list(range(len(before)))
    for place, piece in enumerate(done):
        assert before[piece] <= set(done[:place])
