"""What each policy reuses in front of two real vLLM servers with small pools: policies x gateways x requests.

    python -m tests.vllm.table --out out/vllm-table
    python -m tests.vllm.table --policies predicted_ttft --cells 2x384 --sittings 3

Hits come from vLLM's own counter `vllm:prefix_cache_hits_total`. They are given as a share of what an omniscient
placement would reuse, which computes every prefix once (`workload.attainable`). A trace of each cell's requests is
written beside the table, and stderr says why hits were lost (`losses`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from engine.common.sse import SseDecoder
from engine.contract import headers
from tests.e2e.programs import Program, running
from tests.redis_server import running_redis
from tests.vllm.environment import Environment, make_checkpoint
from tests.vllm.losses import Seen, summary
from tests.vllm.servers import BLOCK_TOKENS, MODEL, ServerSpec, VllmServer, running_servers
from tests.vllm.workload import Ask, Workload, attainable, shared_tokens

HITS = "vllm:prefix_cache_hits_total"
IN_FLIGHT = 3
OUTPUT_TOKENS = 4
SERVERS = 2
REQUEST_TIMEOUT_S = 120.0
CELLS = ("1x192", "2x192", "1x384", "2x384")
POLICIES = ("predicted_ttft", "cache_aware", "prefix_hash", "round_robin")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `hits` and `attainable` in tokens."""

    policy: str
    gateways: int
    requests: int
    sitting: int
    hits: float
    attainable: int
    mean_ttft_s: float
    losses: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Return the hits as a share of the attainable ones."""
        return self.hits / self.attainable

    def __str__(self) -> str:
        lost = "".join(f"\n    lost {line}" for line in self.losses)
        return (
            f"{self.policy} {self.gateways}x{self.requests} sitting {self.sitting}: {self.share:.1%} of "
            f"{self.attainable} tokens, mean TTFT {1000 * self.mean_ttft_s:.0f} ms{lost}"
        )


def gateway(servers: Sequence[VllmServer], policy: str, redis_url: str, *flags: str) -> Program:
    """Start a gateway in front of the servers; the caller calls `wait_ready` and `stop`."""
    engines = ",".join(server.url for server in servers)
    return Program(
        "router",
        f"--engines={engines}",
        "--port=0",
        "--admin-port=0",
        f"--policy={policy}",
        f"--redis-url={redis_url}",
        *flags,
    )


@contextlib.contextmanager
def gateways(
    servers: Sequence[VllmServer], count: int, policy: str, redis_url: str, *flags: str
) -> Iterator[list[Program]]:
    """Yield `count` ready gateways."""
    programs = [gateway(servers, policy, redis_url, *flags) for _ in range(count)]
    with running(programs):
        yield programs


async def ask(http: aiohttp.ClientSession, url: str, ask: Ask, began_s: float) -> Seen:
    """Send one request and read its stream to the end. Raise AssertionError unless the answer is whole."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": ask.prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s, first_s = time.monotonic() - began_s, 0.0
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, f"{answer.status}: {await answer.text()}"
        decoder = SseDecoder()
        events: list[bytes] = []
        async for chunk in answer.content.iter_any():
            if not events:
                first_s = time.monotonic() - began_s
            events += decoder.feed(chunk)
        pod, predicted = answer.headers[headers.POD], int(answer.headers[headers.PREDICTED_CACHED])
    assert events[-1:] == [b"[DONE]"], f"a stream that ends in {events[-1:]}"
    usage = json.loads(events[-2])["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    ended_s = time.monotonic() - began_s
    return Seen(
        ask.number, ask.prefix, ask.gateway, pod, predicted, cached, usage["prompt_tokens"], sent_s, first_s, ended_s
    )


async def play(programs: Sequence[Program], asks: Sequence[Ask]) -> list[Seen]:
    """Send the requests in order, `IN_FLIGHT` at a time. `programs` may change meanwhile: a request goes to the program
    that is at its gateway's number when the request is sent."""
    began_s, left = time.monotonic(), iter(asks)
    seen: list[Seen] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        async def client() -> None:
            for each in left:
                got = await ask(http, programs[each.gateway].url, each, began_s)
                seen.append(got)

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(client())
    return seen


def hits(servers: Sequence[VllmServer]) -> float:
    """Prompt tokens that the servers have reused so far, by their own counters."""
    return sum(server.metric(HITS) for server in servers)


def measure(
    servers: Sequence[VllmServer], policy: str, workload: Workload, sitting: int = 1, out: Path | None = None
) -> Cell:
    """Measure one cell, with cold caches and gateways that have just started. `out`: folder for the trace."""
    asks = workload.asks()
    prompts = [servers[0].tokenize(each.prompt) for each in asks]
    best, shared = attainable(prompts, BLOCK_TOKENS), shared_tokens(asks, prompts)
    for server in servers:
        server.reset_cache()
    with running_redis() as redis, gateways(servers, workload.gateways, policy, redis.url) as programs:
        before = hits(servers)
        seen = asyncio.run(play(programs, asks))
        reused = hits(servers) - before
    if out is not None:
        path = out / f"{policy}-{workload.gateways}x{workload.requests}-{sitting}.jsonl"
        path.write_text("".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in seen))
    ttft_s = statistics.fmean(each.first_s - each.sent_s for each in seen)
    losses = tuple(summary(seen, shared, best))
    return Cell(policy, workload.gateways, workload.requests, sitting, reused, best, ttft_s, losses)


def rows(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of the table in Markdown: for each cell the median of its sittings, and all of them."""
    yield "| policy | gateways | requests | hits, share of the attainable reuse: median | sittings | mean TTFT |"
    yield "|---|--:|--:|--:|---|--:|"
    order = sorted(cells, key=lambda cell: (cell.policy, cell.requests, cell.gateways))
    for _, group in itertools.groupby(order, key=lambda cell: (cell.policy, cell.requests, cell.gateways)):
        of_cell = list(group)
        first, shares = of_cell[0], [cell.share for cell in of_cell]
        ttft_s = statistics.median(cell.mean_ttft_s for cell in of_cell)
        yield (
            f"| `{first.policy}` | {first.gateways} | {first.requests} | {statistics.median(shares):.1%} "
            f"| {', '.join(f'{share:.1%}' for share in shares)} | {1000 * ttft_s:.0f} ms |"
        )


def main() -> None:
    """See the module."""
    signal.signal(signal.SIGTERM, _end)
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.table", description="Hits of policies before two real vLLM servers with small pools."
    )
    parser.add_argument("--out", type=Path, default=Path("out/vllm-table"), help="folder for the table and the traces")
    parser.add_argument("--policies", type=_words, default=list(POLICIES), help="comma-separated")
    parser.add_argument("--cells", type=_words, default=list(CELLS), help="GATEWAYSxREQUESTS, comma-separated")
    parser.add_argument("--sittings", type=int, default=1, help="times each cell is measured, each in its own order")
    parser.add_argument("--first-sitting", type=int, default=1, help="first sitting's number, which seeds its order")
    parser.add_argument("--blocks", type=int, default=640, help="blocks of 32 tokens in each server's pool")
    given = parser.parse_args()
    environment = Environment.default()
    if not environment.is_ready:
        sys.exit(f"no vLLM in {environment.folder}: `python -m tests.vllm.environment` installs one")
    given.out.mkdir(parents=True, exist_ok=True)
    cells = []
    with tempfile.TemporaryDirectory(prefix="wr-vllm-") as scratch:
        folder = Path(scratch)
        specs = [ServerSpec(blocks=given.blocks)] * SERVERS
        with running_servers(environment.binaries, make_checkpoint(folder), folder, specs) as servers:
            sittings = range(given.first_sitting, given.first_sitting + given.sittings)
            for sitting, shape, policy in itertools.product(sittings, given.cells, given.policies):
                count, requests = map(int, shape.split("x"))
                cells.append(measure(servers, policy, Workload(requests, count, seed=sitting), sitting, given.out))
                print(cells[-1], file=sys.stderr, flush=True)
    text = "\n".join(rows(cells)) + "\n"
    (given.out / "table.md").write_text(text)
    print(text, end="")


def _words(text: str) -> list[str]:
    return text.split(",")


def _end(*_: object) -> NoReturn:
    """Exit by an exception, so that every block ends its servers."""
    sys.exit(143)


if __name__ == "__main__":
    main()
