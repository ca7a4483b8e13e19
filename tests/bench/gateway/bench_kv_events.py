"""The cost for a gateway of following KV events: CPU time per block, from bytes to the index, for many pods at once.

    python -m tests.bench.gateway.bench_kv_events [--pods 64] [--requests 5]

Every pod has a full cache of 1,000 blocks of 16 tokens: each request of 1,500 tokens, two thirds of them shared with
others, evicts as much as it stores. The figure is the CPU time of one process, including decoding, without ZMQ.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from engine.contract.keys import DEFAULT_STRIDE_BYTES, key_seed, prefix_keys
from router.events.feed import EventFeed
from router.registry.index import PrefixIndex
from router.views.types import PodId
from tests.router.events.model_engine import MODEL, ModelEngine

ROOM, BLOCK = 1_000, 16
PROMPT_TOKENS, SHARED_TOKENS, GENERATED = 1_500, 1_000, 100
BYTES_PER_TOKEN = 4
WARM = 15


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=64, help="pods (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=5, help="measured requests per pod (default: %(default)s)")
    args = parser.parse_args()
    index = PrefixIndex()
    feed = EventFeed(index, stride=DEFAULT_STRIDE_BYTES, belief_ttl_s=600.0, clock=time.monotonic)
    rng = random.Random(1)
    shared = [rng.randbytes(SHARED_TOKENS * BYTES_PER_TOKEN) for _ in range(200)]
    engines = {PodId(f"pod-{at}"): ModelEngine(ROOM, BLOCK) for at in range(args.pods)}
    for pod in engines:
        feed.follow(pod, MODEL)
        feed.flows(pod, is_flowing=True)
    empty = resident()
    spent, routed_s, blocks, batches, size = 0.0, 0.0, 0, 0, 0
    for at in range(WARM + args.requests):
        for pod, engine in engines.items():
            text = rng.choice(shared) + rng.randbytes((PROMPT_TOKENS - SHARED_TOKENS) * BYTES_PER_TOKEN)
            tokens = [int.from_bytes(text[i : i + 4], "big") >> 15 for i in range(0, len(text), 4)]
            keys, session = prefix_keys(text, key_seed(MODEL), DEFAULT_STRIDE_BYTES), f"{at} {pod}"
            read = len(engine.batches)
            engine.serve(tokens, session, generated=range(GENERATED))
            begin = time.process_time()
            feed.on_routed(pod, session, keys, PROMPT_TOKENS * 1.1, 0.0, prompt_bytes=len(text))
            middle = time.process_time()
            before = feed.counts(pod)
            assert before is not None
            told = before.blocks.stored + before.blocks.removed
            for payload in engine.batches[read:]:
                feed.batch(pod, payload)
            feed.on_answered(pod, session, PROMPT_TOKENS)
            feed.tick()
            end = time.process_time()
            if at >= WARM:
                spent += end - middle
                routed_s += middle - begin
                blocks += before.blocks.stored + before.blocks.removed - told
                batches += len(engine.batches) - read
                size += sum(map(len, engine.batches[read:]))
            engine.batches[:] = []
    kept = resident() - empty
    requests = args.requests * args.pods
    print(f"{args.pods} pods, {ROOM} blocks each, {requests} requests, {blocks / requests:.0f} block events a request")
    print(
        f"{1e6 * spent / blocks:.2f} us a block event, {1e6 * spent / requests:.0f} us a request; {size / blocks:.0f} B"
    )
    print(f"{1e6 * routed_s / requests:.1f} us on a request's path")
    print(f"{kept / 2**20:.0f} MiB more than before, those of the model engines included")
    print(f"{index.statistics()}")


if __name__ == "__main__":
    main()
