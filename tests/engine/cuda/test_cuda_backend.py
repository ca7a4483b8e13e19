"""The CUDA backend on a CPU device, with kernels in Triton's interpreter, against the torch backend."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.kernels.step import StepTensors
from engine.backend.torch_backend import TorchBackend
from engine.grammar.fills import MaskFills
from engine.model.decoder import Decoder, load_decoder
from engine.sched.plan import PENDING, SequenceChunk, StepPlan
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from tests.engine.cuda.answering import (
    BLOCK_SIZE,
    BLOCKS,
    MAX_RUNNING,
    TWO_LAYERS,
    agree,
    answers,
    cuda_backend,
    prompts,
    with_kernels,
)
from tests.engine.cuda.devices import CpuDevice, plain
from tests.engine.cuda.torch_forward import torch_forward
from tests.engine.grammar.scripted import scripted
from tests.engine.model.helpers import GREEDY, hf_model, save, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(hf_model("Qwen2", **TWO_LAYERS), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_decoder(folder)


@pytest.mark.parametrize("graphs", [0, MAX_RUNNING])
@plain
async def test_the_engine_answers_as_with_the_torch_backend(model: Decoder, graphs: int) -> None:
    """Mixed steps overlap. Requests reuse prefixes, sample, have penalties or log-probabilities, or stop early."""
    device = CpuDevice()
    expected = await answers(TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE), prompts())
    found = await answers(cuda_backend(model, device, graphs=graphs), prompts())
    agree(found, expected)
    assert any(logprob is not None for _, logprob in found[4])
    assert (sum(graph.replays - 1 for graph in device.graphs) > 5) == bool(graphs), "capturing replays each graph once"


@pytest.mark.parametrize("graphs", [0, MAX_RUNNING])
@plain
async def test_constrained_requests_answer_as_with_the_torch_backend(model: Decoder, graphs: int) -> None:
    """A mask that depends on a token in flight is waited for after the next step's logits are launched."""
    size = model.config.vocab_size

    def allowed(output: Sequence[int]) -> set[int]:
        ends = {0} if len(output) > 3 else set()
        return ends | set(range(1 + sum(output) % 5, size, 5))

    def requests() -> list[Request]:
        asked = [replace(request, stop_token_ids=frozenset({0})) for request in prompts()[:6]]
        return [replace(one, masks=scripted(allowed, size)) if i % 3 else one for i, one in enumerate(asked)]

    torch_backend = TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE)
    expected = await answers(torch_backend, requests(), fills=MaskFills(lambda: None))
    found = await answers(cuda_backend(model, CpuDevice(), graphs=graphs), requests(), fills=MaskFills(lambda: None))
    agree(found, expected)
    for request in requests():
        if request.masks is not None:
            chosen = [token for token, _ in found[request.id]]
            assert all(token in allowed(chosen[:i]) for i, token in enumerate(chosen))


@plain
async def test_requests_that_lose_their_blocks_go_on_in_others(model: Decoder) -> None:
    """The pool is too small for all requests: some are preempted, and computed again."""

    def requests() -> list[Request]:
        sampled = SamplingParams(seed=9, top_k=20)
        return [Request(i, tokens(6, i), 30, sampled if i % 2 else GREEDY) for i in range(1, 5)]

    expected = await answers(TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE), requests())
    agree(await answers(cuda_backend(model, CpuDevice(), graphs=MAX_RUNNING), requests(), blocks=14), expected)


@plain
async def test_with_the_kernels_too(folder: Path, device: torch.device) -> None:
    """This runs in the interpreter, or on the card if there is one. A step of one decode token is a graph."""

    def requests() -> list[Request]:
        return [Request(1, tokens(11, 1), 5, GREEDY), Request(2, [*tokens(11, 1), 6], 3, SamplingParams(seed=8))]

    reference = TorchBackend(load_decoder(folder), block_count=BLOCKS, block_size=BLOCK_SIZE)
    expected = await answers(reference, requests())
    model = load_decoder(folder, device=str(device))
    runs_on = CudaDevice(torch.device("cuda", 0)) if device.type == "cuda" else CpuDevice()
    agree(await answers(cuda_backend(model, runs_on, graphs=1, forward=with_kernels(model)), requests()), expected)


def prefill(request: Request, blocks: list[int]) -> SequenceChunk:
    return SequenceChunk(request, 0, request.prompt_tokens, blocks, True, False)


def decode(request: Request, token: int, blocks: list[int], ahead: int) -> SequenceChunk:
    return SequenceChunk(request, len(request.prompt_tokens) + ahead, (token,), blocks, True, True)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # another thread's state raises no event here
            await asyncio.sleep(0.001)


@plain
async def test_a_step_is_launched_before_the_one_before_has_ended(model: Decoder) -> None:
    """The second step's decode tokens are the device's choices, which the host has not seen."""
    device = CpuDevice()
    backend = cuda_backend(model, device)
    one, two = Request(1, tokens(6, 1), 5, GREEDY), Request(2, tokens(5, 2), 5, SamplingParams(seed=3))
    device.held = held = threading.Event()
    first = asyncio.create_task(backend.run(StepPlan((prefill(one, [0, 1]), prefill(two, [2, 3])))))
    await asyncio.sleep(0)
    # Only the second request continues, in another row.
    second = asyncio.create_task(backend.run(StepPlan((decode(two, PENDING, [2, 3], 0),))))
    # Its launch has written the slot of the token that the host did not know.
    await wait_until(lambda: bool(backend.pool.data[3, :, :, 1].isfinite().all()))
    assert not first.done()
    assert not second.done()
    with pytest.raises(RuntimeError, match="2 steps are in progress"):
        await backend.run(StepPlan((decode(one, 3, [0, 1], 0),)))
    held.set()
    chosen = (await first).sampled
    following = (await second).sampled[2]
    await backend.close()

    reference = TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE)
    expected = await reference.run(StepPlan((prefill(one, [0, 1]), prefill(two, [2, 3]))))
    assert chosen == expected.sampled
    two.output_tokens.append(chosen[2].token)
    last = await reference.run(StepPlan((decode(two, chosen[2].token, [2, 3], 0),)))
    assert following == last.sampled[2]
    await reference.close()


@plain
async def test_the_first_rows_of_a_block_are_copied_before_the_step_writes(model: Decoder) -> None:
    """This also holds if another request writes to the source in the same step."""
    text = tokens(14, 1)
    one, two = Request(1, text[:6], 5, GREEDY), Request(2, text[:13], 5, GREEDY)
    results = []
    for backend in (cuda_backend(model, CpuDevice()), TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE)):
        await backend.run(StepPlan((prefill(one, [0, 1]),)))
        rest = SequenceChunk(two, 5, two.prompt_tokens[5:], [0, 2, 3, 4], True, False, source=1)
        results.append((await backend.run(StepPlan((decode(one, 9, [0, 1], 0), rest)))).sampled)
        await backend.close()
    cold = TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE)
    alone = await cold.run(StepPlan((prefill(two, [0, 2, 3, 4]),)))
    await cold.close()
    assert results[0] == results[1]
    assert results[0][2] == alone.sampled[2]


@plain
async def test_results_come_in_order_and_a_failed_step_is_told_in_its_turn(model: Decoder) -> None:
    device = CpuDevice()
    backend = cuda_backend(model, device)
    one, two = Request(1, tokens(6, 1), 5, GREEDY), Request(2, tokens(5, 2), 5, GREEDY)
    device.held = held = threading.Event()
    first = asyncio.create_task(backend.run(StepPlan((prefill(one, [0, 1]),))))
    await asyncio.sleep(0)
    await wait_until(lambda: backend._choices is not None)
    # No step has chosen this token: the step fails at its launch, while the first is still on the device.
    second = asyncio.create_task(backend.run(StepPlan((decode(two, PENDING, [2, 3], 0),))))
    await wait_until(lambda: backend._choices is None)
    await asyncio.sleep(0.01)
    assert not first.done()
    assert not second.done()
    held.set()
    assert list((await first).sampled) == [1]
    with pytest.raises(ValueError, match="chose no token for request 2"):
        await second
    assert device.synchronized == 1
    # The next step cannot have the failed step's choices either.
    with pytest.raises(ValueError, match="chose no token for request 1"):
        await backend.run(StepPlan((decode(one, PENDING, [0, 1], 0),)))
    assert list((await backend.run(StepPlan((prefill(two, [4, 5]),)))).sampled) == [2]
    await backend.close()


@plain
async def test_a_token_that_the_model_lacks_costs_one_step(model: Decoder) -> None:
    """On a card, a lookup out of range would also fail every later step."""
    backend = cuda_backend(model, CpuDevice())
    bad = Request(1, [3, model.config.vocab_size], 5, GREEDY)
    with pytest.raises(ValueError, match="token id 97 is out of range; the model has 97 tokens"):
        await backend.run(StepPlan((prefill(bad, [0]),)))
    assert backend.pool.data.isnan().all(), "nothing of the step was launched"
    good = Request(2, [3, model.config.vocab_size - 1], 5, GREEDY)
    assert list((await backend.run(StepPlan((prefill(good, [0]),)))).sampled) == [2]
    await backend.close()


@plain
async def test_a_cancelled_caller_does_not_stop_the_step_and_close_waits_for_it(model: Decoder) -> None:
    device = CpuDevice()
    backend = cuda_backend(model, device)
    device.held = held = threading.Event()
    caller = asyncio.create_task(backend.run(StepPlan((prefill(Request(1, tokens(5), 5, GREEDY), [0, 1]),))))
    await wait_until(lambda: bool(backend.pool.data[0].isfinite().all()))
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    closing = asyncio.create_task(backend.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    held.set()
    await asyncio.wait_for(closing, 20)
    await backend.close()
    with pytest.raises(RuntimeError):
        await backend.run(StepPlan((prefill(Request(1, tokens(5), 5, GREEDY), [0, 1]),)))


@plain
async def test_a_step_without_samples_has_a_result_too(model: Decoder) -> None:
    plain_forward, threads = torch_forward(model, 20), []

    def forward(step: StepTensors, pool: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return plain_forward(step, pool)

    backend = cuda_backend(model, CpuDevice(), forward=forward)
    part = SequenceChunk(Request(1, tokens(9), 5, GREEDY), 0, tokens(9)[:4], [7], False, False)
    result = await backend.run(StepPlan((part,)))
    assert result.sampled == {}
    assert result.elapsed_s > 0
    assert threads == ["cuda-step_0"], "off the event loop's thread"
    assert backend.pool.data[7].isfinite().all()
    await backend.close()


def test_what_is_done_before_requests_come_is_done_by_the_thread_that_serves_them(model: Decoder) -> None:
    """cuBLAS's memory for a thread is made, and counted, at the start, and exists as long as the graphs that use it."""
    plain_forward, threads = torch_forward(model, 20), []

    def forward(step: StepTensors, pool: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        return plain_forward(step, pool)

    backend = cuda_backend(model, CpuDevice(), graphs=2, forward=forward)
    backend.warm_up(StepPlan((prefill(Request(1, tokens(5), 5, GREEDY), [0, 1]),)))
    captured = len(threads)
    asyncio.run(backend.run(StepPlan((prefill(Request(2, tokens(5), 5, GREEDY), [2, 3]),))))
    assert captured > 4
    assert {thread.name for thread in threads} == {"cuda-step_0"}
    assert len(set(threads)) == 1
    backend.shutdown()
    assert not threads[0].is_alive()


def test_a_step_writes_only_its_own_slots_padding_rows_none(model: Decoder) -> None:
    device = CpuDevice()
    backend = cuda_backend(model, device, graphs=MAX_RUNNING)
    assert backend.pool.data.isnan().all(), "capturing writes nothing"
    requests = [Request(i, tokens(4, i), 5, GREEDY) for i in (1, 2, 3)]
    backend.step(StepPlan(tuple(prefill(request, [i]) for i, request in enumerate(requests))))
    written = backend.pool.data.isfinite().all(-1).all(-1)
    before = [graph.replays for graph in device.graphs]
    backend.step(StepPlan(tuple(decode(request, 5, [i, 10 + i], 0) for i, request in enumerate(requests))))
    assert sum(graph.replays for graph in device.graphs) == sum(before) + 1
    for block in (10, 11, 12):
        written[block, :, :, 0] = True
    assert torch.equal(backend.pool.data.isfinite().all(-1).all(-1), written)


def test_a_backend_with_graphs_gives_its_pool_back_at_once(model: Decoder) -> None:
    """The pool is most of a card's memory, so its release must not wait for the garbage collector."""
    backend = cuda_backend(model, CpuDevice(), graphs=2)
    pool = weakref.ref(backend.pool)
    gc.disable()
    try:
        del backend
        assert pool() is None
    finally:
        gc.enable()
