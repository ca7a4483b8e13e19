"""The card: every operation on its tensors becomes a piece of work on the calling thread's stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.emulated_card.memory import Allocation, Memory, Pool, poison
from tests.emulated_card.streams import Mark, Schedule, Stream, Streams, Work
from tests.emulated_card.tensor import CardTensor

_WHOLE = ("scaled_dot_product_attention",)
"""Composite operations that are not decomposed, because their parts would make some tensors without a device."""
_READ = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")
"""Operations for which the host must know the result or its shape."""
_INDEXED = ("index", "index_put", "index_put_")
_FILLED = ("masked_fill", "masked_fill_")


@dataclass(eq=False)
class Recording:
    """What was captured from a stream."""

    pool: Pool
    """The graph's own memory pool, which work outside of graphs does not use."""
    pieces: list[Work] = field(default_factory=list)


class Card:
    """One device, `cuda:0`. All of its methods may be called from any thread."""

    def __init__(self, total_bytes: int, schedule: Schedule, seed: int = 0) -> None:
        self.device = torch.device("cuda", 0)
        self.memory = Memory(total_bytes)
        self.streams = Streams(schedule, seed)
        self.lock = threading.RLock()
        self.waiting_fails = False
        """Whether an operation that waits for the card raises, as after `torch.cuda.set_sync_debug_mode("error")`."""
        self._default = self.streams.add()
        self._captured: dict[Stream, Recording] = {}
        self._own = threading.local()

    @property
    def current(self) -> Stream:
        """The stream on which this thread launches."""
        return getattr(self._own, "stream", self._default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._own.stream = stream

    # Launching and waiting.

    def put(self, work: Work, stream: Stream | None = None) -> None:
        """Launch work on a stream (None: the current one), or append it to the recording if the stream is captured."""
        with self.lock:
            self.take_back()
            stream = stream or self.current
            if stream in self._captured:
                self._captured[stream].pieces.append(work)
            else:
                self.streams.put(stream, work)

    def launch(self, recording: Recording) -> None:
        """Launch the recorded work on the current stream."""
        with self.lock:
            for piece in recording.pieces:
                self.put(piece)

    def mark(self, stream: Stream | None = None) -> Mark:
        """Record an event on a stream (None: the current one). Raises RuntimeError while the stream is captured."""
        with self.lock:
            self.take_back()
            self.forbid_in_capture("recording an event that others wait for", stream or self.current)
            return self.streams.mark(stream or self.current)

    def put_behind(self, mark: Mark, stream: Stream | None = None) -> None:
        """Have a stream (None: the current one) wait for an event. Raises RuntimeError while the stream is captured."""
        with self.lock:
            self.forbid_in_capture("waiting for what is not captured", stream or self.current)
            self.put(mark.reach, stream)

    def reach(self, mark: Mark) -> None:
        """Block until an event has passed."""
        with self.lock:
            self.forbid_in_capture("synchronizing", self.current)
            mark.reach()

    def has_passed(self, mark: Mark) -> bool:
        """Whether an event has passed. If not, the card does one more piece of work."""
        with self.lock:
            self.forbid_in_capture("asking for an event", self.current)
            if mark.passed:
                return True
            self.streams.tick()
            return False

    def finish(self, stream: Stream | None = None) -> None:
        """Block until all that was launched on a stream (None: on any) is done."""
        with self.lock:
            self.take_back()
            self.forbid_in_capture("synchronizing", self.current, *([stream] if stream else self._captured))
            if stream is None:
                self.streams.finish()
            else:
                stream.run(stream.end)

    def capture(self, stream: Stream, into: Recording) -> None:
        """From now on, record the work launched on this stream and do not run it."""
        with self.lock:
            self.take_back()
            self._captured[stream] = into

    def end_capture(self, stream: Stream) -> None:
        """Undo `capture`."""
        with self.lock:
            self.take_back()
            del self._captured[stream]

    def forbid_in_capture(self, what: str, *streams: Stream) -> None:
        """Raise RuntimeError if one of the streams is captured."""
        if not self._captured.keys().isdisjoint(streams):
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def take_back(self) -> None:
        """Have streams poison the memory of tensors that are gone. It may be allocated again at once."""
        with self.lock:
            while self.memory.given_back:
                region = self.memory.given_back.popleft()
                self.memory.free(region)
                work, recording = partial(poison, region.data), self._captured.get(region.stream)
                if recording is not None and recording.pool is region.pool:
                    recording.pieces.append(work)
                else:  # freeing memory that a graph did not allocate is not the graph's work
                    self.streams.put(region.stream, work)

    def wait(self, what: str, stream: Stream | None = None) -> None:
        """Block until a stream (None: the current one) is done, or raise if `waiting_fails`."""
        with self.lock:
            self.forbid_in_capture(what, self.current)
            if self.waiting_fails:
                raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
            self.finish(stream or self.current)

    # Making tensors.

    def allocate(self, size: int) -> Allocation:
        """Return memory of so many bytes for the current stream. Raises torch.OutOfMemoryError."""
        with self.lock:
            self.take_back()
            recording = self._captured.get(self.current)
            return self.memory.allocate(size, self.current, recording.pool if recording else None)

    def empty(self, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> CardTensor:
        """Return an uninitialized tensor. Raises torch.OutOfMemoryError."""
        shape = torch.empty(tuple(size), dtype=dtype, device="meta")
        if stride is not None:
            shape = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
        last = sum((n - 1) * step for n, step in zip(shape.shape, shape.stride(), strict=True))
        allocation = self.allocate((last + 1) * dtype.itemsize if shape.numel() else 0)
        with torch.inference_mode(False):
            data = allocation.region.data.view(dtype).as_strided(shape.shape, shape.stride())
        return CardTensor(data, allocation, self)

    def upload(self, source: Tensor, *, non_blocking: bool = False) -> CardTensor:
        """Return a copy of a host tensor on the card."""
        target = self.empty(source.shape, source.dtype, torch.empty_like(_shape(source)).stride())
        self.copy(target, source, non_blocking)
        return target

    def computed(self, values: Tensor) -> CardTensor:
        """Return `values` as a tensor that the card computes without the host."""
        target = self.empty(values.shape, values.dtype)
        here = target.data_here
        self.put(lambda: here.copy_(values))
        return target

    # Operations.

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of torch with at least one argument on this card."""
        with self.lock:
            name = func.overloadpacket.__name__
            if name == "copy_":
                return self.copy(*args, **kwargs)
            if name == "_to_copy" and torch.device(kwargs.get("device") or self.device).type == "cpu":
                return self._download(*args, **kwargs)
            if name == "is_pinned":
                return False
            if name not in _WHOLE and func._can_decompose():  # in inference mode, torch does not decompose it
                return func.decompose(*args, **kwargs)
            returned = [result.alias_info for result in func._schema.returns]
            if any(alias is not None and not alias.is_write for alias in returned):
                base = next(one for one in args if isinstance(one, CardTensor))
                return tree_map_only(Tensor, base.part, func(*on_host(args), **on_host(kwargs)))
            if name in _INDEXED:  # torch sends indices that are on the host to the card, and waits
                args = (args[0], tree_map_only(Tensor, self._sent, args[1]), *args[2:])
            _check_devices(func, args, kwargs)
            if needs_host := _needs_host(name, args):
                self.wait(str(func))
            if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments):
                return self._write(func, args, kwargs)
            if needs_host:
                return tree_map_only(Tensor, self.computed, func(*on_host(args), **on_host(kwargs)))
            return self._compute(func, args, kwargs)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Do `target.copy_(source)` on the card or between card and host. The copy reads or writes host memory when it
        is done, not at its launch."""
        to, given = on_host(target), on_host(source)
        with self.lock:
            self.put(lambda: to.copy_(given))
            for host in (one for one in (target, source) if not isinstance(one, CardTensor)):
                # Host memory that is not page-locked, or not in one piece, is copied through another buffer. Then the
                # thread may wait although it did not ask to.
                if not (non_blocking and host.is_contiguous() and self.memory.is_locked(host)):
                    self.wait(f"a copy of {tuple(source.shape)}")
            return target

    def _download(self, source: Tensor, *, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
        """Copy to the host. Without blocking, torch uses page-locked memory, and the reader must wait first."""
        host = torch.empty_like(_shape(source), dtype=dtype, device="cpu")
        if non_blocking:
            self.memory.keep_locked(host)
        return self.copy(host, source, non_blocking)

    def _sent(self, index: Tensor) -> Tensor:
        return index if isinstance(index, CardTensor) else self.upload(index)

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation in place, or one that writes into a given tensor."""
        here, named = on_host(args), on_host(kwargs)
        self.put(lambda: func(*here, **named))
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        names = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        written = tuple(given[name] for name in names)
        return written[0] if len(func._schema.returns) == 1 else written[: len(func._schema.returns)] or None

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that makes new tensors, whose shapes follow from those of its arguments."""
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        on_meta = {"device": "meta"} if any(one.name == "device" for one in func._schema.arguments) else {}
        shapes = func(*tree_map_only(Tensor, _shape, args), **tree_map_only(Tensor, _shape, kwargs), **on_meta)
        made = tree_map_only(Tensor, lambda shape: self.empty(shape.shape, shape.dtype, shape.stride()), shapes)
        here, named, out = on_host(args), on_host(kwargs), on_host(made)

        def work() -> None:
            for target, result in zip(tree_leaves(out), tree_leaves(func(*here, **named)), strict=True):
                target.copy_(result)

        self.put(work)
        return made


def on_host(tree: Any) -> Any:
    """Return the arguments with the card's tensors replaced by host tensors."""
    return tree_map(lambda one: one.data_here if isinstance(one, CardTensor) else one, tree)


def _needs_host(name: str, args: Any) -> bool:
    """Whether torch copies values that the operation needs from card to host, such as a mask or a fill value."""
    if name in _INDEXED:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return name in _READ or (name in _FILLED and isinstance(args[-1], CardTensor))


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError if a host tensor is among the arguments. Host tensors without dimensions are allowed."""
    for one in tree_leaves((args, kwargs)):
        if isinstance(one, Tensor) and not isinstance(one, CardTensor) and one.dim():
            raise RuntimeError(
                f"{func}: Expected all tensors to be on the same device, but found cuda:0 and {one.device}"
            )
