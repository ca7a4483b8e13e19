"""The cost of recording a stream so that another pod can continue it: CPU time of the relay per chunk.

    python -m tests.bench.gateway.bench_resume [--chunks 2000] [--repeats 30]

The same chunks are copied alternately with and without a record, from memory to memory, without sockets. When a pod
breaks, the gateway reads what was recorded and writes the request for the rest; the bench also prints the cost of that.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from typing import Any

import orjson
import uvloop

from engine.contract.requests import Endpoint
from router.continuing.continuations import Continuation
from router.continuing.resume import ask
from router.continuing.transcript import SentEvents
from router.engines.stream_reader import StreamReader
from router.forwarding.relay import Relay

HEAD = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1700000000, "model": "a-model"}


def event(i: int) -> bytes:
    """Return about 200 bytes, as engines send them for a token."""
    choice = {"index": 0, "delta": {"content": f" word{i}"}, "logprobs": None, "finish_reason": None}
    return b"data: " + orjson.dumps({**HEAD, "choices": [choice]}) + b"\n\n"


class Source:
    def __init__(self, chunks: list[bytes]) -> None:
        self._next = iter(chunks).__next__
        self.is_read = False

    async def readany(self) -> bytes:
        try:
            return self._next()
        except StopIteration:
            return b""


class Sink:
    async def write(self, data: bytes) -> None: ...

    async def write_eof(self) -> None: ...


async def copied_us(chunks: list[bytes], record: SentEvents | None) -> float:
    """Return CPU microseconds per chunk."""
    sink: Any = Sink()
    deadline_s = asyncio.get_running_loop().time() + 60
    reader = StreamReader(Endpoint.CHAT)
    relay = Relay(Source(chunks[1:]), sink, reader=reader, idle_s=60.0, deadline_s=deadline_s, sent=record)
    started_s = time.process_time()
    await relay.copy(chunks[0])
    return (time.process_time() - started_s) / len(chunks) * 1e6


async def measure(count: int, repeats: int) -> None:
    chunks = [event(i) for i in range(count)]
    without, kept = [], []
    gc.disable()
    for _ in range(repeats):
        without.append(await copied_us(chunks, None))
        kept.append(await copied_us(chunks, SentEvents(Endpoint.CHAT, lambda size: True)))
    more = [b - a for a, b in zip(without, kept, strict=True)]
    low, middle, high = statistics.quantiles(more, n=4)
    print(f"{count} chunks of {len(chunks[-1])} bytes, {repeats} pairs, medians; us of CPU a chunk")
    print(f"  relay alone       {statistics.median(without):6.2f}")
    print(f"  keeping           {statistics.median(kept):6.2f}")
    print(f"  more              {middle:6.2f}  (quartiles {low:.2f} to {high:.2f})")

    fields = {"model": "a-model", "messages": [{"role": "user", "content": "x" * 8192}], "stream": True}
    record = SentEvents(Endpoint.CHAT, lambda size: True)
    for chunk in chunks:
        record.add(chunk)
    body = orjson.dumps(fields)
    started_s = time.process_time()
    ask(Endpoint.CHAT, orjson.loads(body), record.read(), Continuation.MESSAGE)
    print(f"once a pod breaks, for a request of 8 KB: {(time.process_time() - started_s) * 1e6:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    uvloop.run(measure(given.chunks, given.repeats))


if __name__ == "__main__":
    main()
