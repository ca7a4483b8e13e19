"""Streams, and the events that order them. Work on a stream is done when a thread waits for it, or at random."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

Work = Callable[[], object]


class Schedule(Enum):
    """How soon a card does launched work that nobody waits for."""

    EAGER = "eager"
    """At once."""
    LAZY = "lazy"
    """Never: work is only done when a thread waits for it, or for later work."""
    RANDOM = "random"
    """At each launch, some pieces of work are done, on any streams."""


@dataclass(eq=False)
class Stream:
    """Pieces of work in order. A piece that raises stays the first, so everybody who waits for it or for later pieces
    gets its error, as with a card that was lost."""

    pieces: deque[Work] = field(default_factory=deque)
    done: int = 0
    """The number of pieces that were done and removed."""

    @property
    def end(self) -> int:
        """The place after the last piece. Places count all pieces since the stream was made."""
        return self.done + len(self.pieces)

    def step(self) -> None:
        """Do the first piece, if there is one."""
        if self.pieces:
            with torch.inference_mode():  # this mode may write to any tensor, even to one made outside of it
                self.pieces[0]()
            self.pieces.popleft()
            self.done += 1

    def run(self, place: int) -> None:
        """Do all pieces before a place."""
        while self.done < place:
            self.step()


@dataclass(eq=False)
class Mark:
    """An event as it was recorded: a place in a stream."""

    stream: Stream
    place: int
    at_s: float | None = None
    """When the stream reached the place."""

    @property
    def passed(self) -> bool:
        """Whether the stream has reached the place."""
        return self.at_s is not None

    def reach(self) -> None:
        """Do all pieces up to the mark. Put on another stream, this call makes that stream wait for the mark."""
        self.stream.run(self.place + 1)


class Streams:
    """All streams of a card."""

    def __init__(self, schedule: Schedule, seed: int = 0) -> None:
        """`seed` decides the random schedule, and which pieces are done while a thread polls."""
        self._schedule = schedule
        self._chance = random.Random(seed)
        self._all: list[Stream] = []

    def add(self) -> Stream:
        """Return a new stream."""
        self._all.append(Stream())
        return self._all[-1]

    def put(self, stream: Stream, work: Work) -> None:
        """Append work, and do as much as the schedule says."""
        stream.pieces.append(work)
        if self._schedule is Schedule.EAGER:
            stream.run(stream.end)
        elif self._schedule is Schedule.RANDOM:
            for _ in range(self._chance.randrange(3)):
                self.tick()

    def mark(self, stream: Stream) -> Mark:
        """Record an event."""
        mark = Mark(stream, stream.end)

        def pass_by() -> None:
            mark.at_s = time.perf_counter()

        self.put(stream, pass_by)
        return mark

    def tick(self) -> None:
        """Do one piece of some stream. Code that polls calls this; otherwise it would poll for ever."""
        busy = [stream for stream in self._all if stream.pieces]
        if busy:
            self._chance.choice(busy).step()

    def finish(self) -> None:
        """Do all pieces of all streams."""
        for stream in self._all:
            stream.run(stream.end)
