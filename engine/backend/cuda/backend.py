"""A `Backend` for CUDA that computes one step while the next is prepared and launched.

It has two threads. One turns plans into launches, and waits for the device only if a constraint's mask depends on a
token that is on its way. The other waits for each step's results in page-locked memory and returns them to the caller
of `run`. The tokens that the last step chose stay on the device, so a decode step can be planned before the host knows
them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.backend.cuda.build import DecodeShape, HostStep, StepBuilder, is_decode, table_widths
from engine.backend.cuda.device import Device, Event
from engine.backend.cuda.graphs import Graphs
from engine.backend.cuda.kernels.step import StepTensors
from engine.backend.cuda.kernels.tiling import Tiling
from engine.backend.cuda.packing import Downloads, Uploads
from engine.backend.cuda.sampler import HostSampling
from engine.backend.sampler import masks_of
from engine.backend.torch_kv import KvPool
from engine.model.decoder import Decoder
from engine.sched.plan import SampledToken, SequenceChunk, StepPlan, StepResult

Forward = Callable[[StepTensors, Tensor], Tensor]
"""(step, `KvPool.data`) -> float32 logits [R, vocab_size], in a buffer that the next call may reuse."""
_T = TypeVar("_T")
_MAX_IN_FLIGHT = 2
RING = _MAX_IN_FLIGHT + 1
"""Number of buffers: one for each step in flight, and one for the step being prepared."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched step."""

    step: HostStep
    asked: HostSampling
    results: NDArray[np.int32]
    start: Event
    end: Event


@dataclass(frozen=True, slots=True)
class _Choices:
    """The tokens that the last step chose, on the device."""

    tokens: Tensor
    row_of: Mapping[int, int]
    """Request id -> row."""


class CudaBackend:
    """See `Backend`. `start.start_cuda` makes one with all its parts."""

    def __init__(
        self, device: Device, model: Decoder, forward: Forward, pool: KvPool, *, tiling: Tiling, max_blocks: int
    ) -> None:
        """`tiling`: see `StepBuilder`. `max_blocks`: blocks of the longest sequence."""
        self.model = model
        self.pool = pool
        self._device = device
        self._forward = forward
        self._widths = table_widths(max_blocks, pool.block_size)
        self._builder = StepBuilder(pool.block_size, tiling, self._widths)
        self._uploads = Uploads(device, buffers=RING)
        self._downloads = Downloads(device, buffers=RING)
        self._mask_uploads = Uploads(device, buffers=RING)
        self._graphs: Graphs | None = None
        self._choices: _Choices | None = None
        self._outcomes: deque[Future[StepResult]] = deque()
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cuda-step")
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cuda-result")

    @property
    def max_in_flight(self) -> int:
        """See `Backend.max_in_flight`."""
        return _MAX_IN_FLIGHT

    async def run(self, plan: StepPlan) -> StepResult:
        """See `Backend.run`. Raises RuntimeError after `close`, and while two steps are in progress."""
        while self._outcomes and self._outcomes[0].done():
            self._outcomes.popleft()
        if len(self._outcomes) >= _MAX_IN_FLIGHT:
            raise RuntimeError(f"{_MAX_IN_FLIGHT} steps are in progress, as many as this backend takes at once")
        outcome: Future[StepResult] = Future()
        outcome.set_running_or_notify_cancel()  # so that cancelling the caller does not stop the step
        self._launcher.submit(self._begin, plan, outcome)
        self._outcomes.append(outcome)
        return await asyncio.wrap_future(outcome)

    async def close(self) -> None:
        """See `Backend.close`. Closing twice is harmless."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Do the same as `close`, without an event loop: wait on the calling thread until both threads have ended."""
        self._launcher.shutdown()
        self._waiter.shutdown()

    def step(self, plan: StepPlan) -> StepResult:
        """Compute a step on the calling thread and wait for it; no other step may be in progress."""
        return self._result(self._launch(plan.chunks))

    def warm_up(self, plan: StepPlan) -> None:
        """Compute a step on the launching thread and wait for it. Call it before the first `run`.

        cuBLAS has a handle and tens of MiB of workspace for each thread. This call allocates them for the launching
        thread before requests come, so that they are part of the measured memory.
        """
        self._result(self._on_launcher(lambda: self._launch(plan.chunks)))

    def capture_graphs(self, max_batch: int, limit_bytes: int) -> None:
        """Make decode steps of up to `max_batch` sequences run as CUDA graphs. Call it before the first `run`.

        The launching thread captures them: the graphs hold the address of that thread's cuBLAS workspace, which exists
        as long as the thread.
        """
        device, forward, pool = self._device, self._forward, self.pool.data
        widths = self._widths  # a reference to self would be a cycle that keeps the pool alive

        def capture() -> Graphs:
            with device.use():
                graphs = Graphs(device, lambda step: forward(step, pool), max_batch, widths)
                graphs.capture(limit_bytes)
            return graphs

        self._graphs = self._on_launcher(capture)

    def _on_launcher(self, work: Callable[[], _T]) -> _T:
        try:
            return self._launcher.submit(work).result()
        finally:
            # Makes the thread drop `work`, and so its reference to the pool.
            self._launcher.submit(int).result()

    def _begin(self, plan: StepPlan, outcome: Future[StepResult]) -> None:
        """Runs on the launching thread. Outcomes go through the waiting thread, so that calls return in order."""
        try:
            launched = self._launch(plan.chunks)
        except BaseException as error:  # raised again where the outcome is awaited
            self._choices = None
            self._waiter.submit(self._fail, error, outcome)
        else:
            self._waiter.submit(self._finish, launched, outcome)

    def _finish(self, launched: _Launched, outcome: Future[StepResult]) -> None:
        try:
            outcome.set_result(self._result(launched))
        except BaseException as error:  # raised again where the outcome is awaited
            outcome.set_exception(error)

    def _fail(self, error: BaseException, outcome: Future[StepResult]) -> None:
        try:
            self._device.synchronize()  # work launched before the failure still touches the pool
        finally:
            outcome.set_exception(error)

    def _launch(self, chunks: Sequence[SequenceChunk]) -> _Launched:
        """Launch a whole step, including the copy of its results, without waiting for any of it."""
        with self._device.use():
            shape = self._graph_shape(chunks)
            last = self._choices
            step = self._builder.build(chunks, last.row_of if last else {}, shape)
            _check_ids(step, self.model.config.vocab_size)
            asked = HostSampling.of(step.sampling, self.model.config.vocab_size)
            start = self._device.event()
            packed = self._uploads.send((*step.arrays, step.pending_rows, step.pending_choices, *asked.arrays))
            of_step = len(step.arrays)
            pending_rows, pending_choices, *sampling = packed.views[of_step:]
            tensors = step.on_device(packed.views[:of_step])
            self.pool.copy_sources(chunks)
            if last is not None and len(step.pending_rows):
                tensors.tokens[pending_rows] = last.tokens[pending_choices]
            if shape is not None and self._graphs is not None:
                logits = self._graphs.replay(shape, packed.data)[: asked.rows]
            else:
                logits = self._forward(tensors, self.pool.data)
            tokens, results = asked.choose(logits, sampling, self._masks(step.sampling))
            self._choices = _Choices(tokens, {chunk.request.id: row for row, chunk in enumerate(step.sampling)})
            return _Launched(step, asked, self._downloads.fetch(results), start, self._device.event())

    def _masks(self, chunks: Sequence[SequenceChunk]) -> Sequence[Tensor]:
        """Return the rows with masks and the masks, on the device; nothing if there are none.

        If the step before this one is in progress, this waits until its tokens are known and their masks are computed.
        The device computes this step's logits meanwhile.
        """
        if all(chunk.request.masks is None for chunk in chunks):
            return ()
        rows, masks = masks_of([chunk.request for chunk in chunks], [chunk.output_index for chunk in chunks])
        return self._mask_uploads.send((np.array(rows, dtype=np.int64), masks)).views if rows else ()

    def _result(self, launched: _Launched) -> StepResult:
        launched.end.wait()
        chunks = launched.step.sampling
        tokens = launched.asked.read(launched.results, chunks)
        sampled: dict[int, SampledToken] = {c.request.id: token for c, token in zip(chunks, tokens, strict=True)}
        return StepResult(sampled, launched.start.seconds_to(launched.end))

    def _graph_shape(self, chunks: Sequence[SequenceChunk]) -> DecodeShape | None:
        """Return the shape of the captured graph for these chunks; None if there is none."""
        if self._graphs is None or not all(is_decode(chunk) and chunk.samples for chunk in chunks):
            return None
        return self._graphs.find(len(chunks), max(len(chunk.blocks) for chunk in chunks))


def _check_ids(step: HostStep, vocab_size: int) -> None:
    """Fail one step for a bad token id. On a card, a lookup out of range would end the context and all later steps."""
    largest = int(step.arrays[0].max())
    if largest >= vocab_size:
        raise ValueError(f"token id {largest} is out of range; the model has {vocab_size} tokens")
