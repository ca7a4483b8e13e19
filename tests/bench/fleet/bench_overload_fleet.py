"""Overload over real sockets: two emulated engines, a Redis, the gateway, and clients that demand twice the capacity.

    python -m tests.bench.fleet.bench_overload_fleet [--seconds 15]

Each engine runs 8 requests at a time, and an answer takes over a second: about 13 requests per second in total.
Requests come at even intervals, whatever happens to earlier ones. A request is served in time if its first token comes
within 2 s. The engines' steps take real time, so everything is slower on a busy machine: compare the rows of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from engine.contract import headers
from engine.model.checkpoint import make_checkpoint
from tests.e2e.programs import Program, running
from tests.e2e.stack import Stack, gateway_before
from tests.redis_server import running_redis

ANSWER_TOKENS = 32
BATCH = 8
TTFT_S = 2.0


async def first_token_s(stack: Stack, prompt: str, slo: bool) -> tuple[int, float]:
    """Send one request and read it to its end; return its status and the seconds to its first byte."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True, "ignore_eos": True}
    sent = {headers.TTFT_SLO: f"{1000 * TTFT_S:.0f}"} if slo else {}
    began_s = time.perf_counter()
    async with stack.http.post(f"{stack.gateway}/v1/completions", json=body, headers=sent) as answer:
        await answer.content.readany()
        first_s = time.perf_counter() - began_s
        await answer.read()
        return answer.status, first_s


async def offer(stack: Stack, rate: float, seconds: float, *, slo: bool = False) -> str:
    """Send requests at that rate; return their outcome as text."""
    tasks = []
    began_s = time.perf_counter()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
        prompt = f"Tenant {number % 7} of the service desk. " * 20 + f"Request {number}."
        tasks.append(asyncio.create_task(first_token_s(stack, prompt, slo)))
    answers = await asyncio.gather(*tasks)
    took_s = time.perf_counter() - began_s
    good = sum(status == 200 and first_s <= TTFT_S for status, first_s in answers)
    refused = [first_s for status, first_s in answers if status == 429]
    slowest_s = max(first_s for status, first_s in answers if status == 200)
    at_once = f", the slowest after {max(refused):.2f} s" if refused else ""
    return (
        f"{len(answers)} asked, {good / seconds:.1f} a second in time, slowest first token {slowest_s:.1f} s, "
        f"{len(refused)} refused{at_once}; all over after {took_s:.0f} s"
    )


async def main() -> None:
    """Print four rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--capacity", type=float, default=13.0, help="requests a second that the engines serve")
    options = parser.parse_args()
    with running_redis() as server, tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        make_checkpoint(
            checkpoint, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_position=4096
        )
        flags = ("--model", str(checkpoint), "--served-model-name", "tiny", "--device", "sim", "--port", "0")
        batch = ("--sim-profile", "l4-8b", "--max-running", str(BATCH), "--redis-url", server.url)
        engines = [Program("engine", *flags, *batch) for _ in range(2)]
        with running(engines):
            for load, name, settings, slo in (
                (0.8, "below capacity", {}, False),
                (2.0, "without the queue", {"queue_timeout_s": 0}, False),
                (2.0, "with the queue (1.7 s)", {"queue_timeout_s": 1.7}, False),
                (2.0, "asking for 2 s", {}, True),
            ):
                async with gateway_before(server, engines, **settings) as stack:
                    text = await offer(stack, load * options.capacity, options.seconds, slo=slo)
                print(f"{load:g} x {name}: {text}", flush=True)
                await asyncio.sleep(2.0)


if __name__ == "__main__":
    asyncio.run(main())
