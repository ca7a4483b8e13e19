"""What it costs to tell other gateways of a request, and to hear of theirs: `python -m tests.bench.bench_beliefs`.

CPU time, in us a request of 24 prefix keys of which 8 are a system prompt; batches of 17 requests, as one of three
gateways has them at 1,000 requests/s in all. *Path*: what the request itself waits for.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine.contract.keys import PrefixKey
from router.registry.beliefs import Life
from router.registry.beliefs_codec import decode, encode
from router.registry.beliefs_others import Others
from router.registry.beliefs_own import Notebook
from router.routing.types import PodId
from tests.registry.belief_ends import Beliefs

KEYS, SHARED, BATCH, ROUNDS = 24, 8, 17, 400
PODS = [PodId(f"10.0.0.{i}:8000") for i in range(64)]


def main() -> None:
    """Print medians."""
    rng = random.Random(1)
    head = tuple(PrefixKey(rng.getrandbits(64)) for _ in range(SHARED))
    notebook = Notebook(Life(1), "gateway-1", 256)
    others = Others(Beliefs(PODS), Life(2))
    path_s, encode_s, decode_s, apply_s, sizes = [], [], [], [], []
    for turn in range(ROUNDS):
        now_s = turn * 0.05
        chains = [head + tuple(PrefixKey(rng.getrandbits(64)) for _ in range(KEYS - SHARED)) for _ in range(BATCH)]
        session_id = f"{rng.getrandbits(128):032x}"
        started_s = time.process_time()
        for i, keys in enumerate(chains):
            number = notebook.routed(
                PODS[i], session_id, keys, now_s, prompt_tokens=1500, uncached_tokens=1000, output_tokens=128
            )
            notebook.began(number, now_s, None)
            notebook.ended(number, now_s)
        path_s.append(time.process_time() - started_s)
        data, spent_s = timed(lambda now_s=now_s: encode(notebook.take(now_s)))
        encode_s.append(spent_s)
        sizes.append(len(data))
        message, spent_s = timed(lambda data=data: decode(data))
        decode_s.append(spent_s)
        _, spent_s = timed(lambda message=message, now_s=now_s: others.apply(message, now_s, now_s))
        apply_s.append(spent_s)
    for name, seconds in (("path", path_s), ("encode", encode_s), ("decode", decode_s), ("index, load", apply_s)):
        print(f"{name:12} {statistics.median(seconds) / BATCH * 1e6:6.1f} us a request")
    print(f"{'wire':12} {statistics.median(sizes) / BATCH:6.0f} bytes a request")


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its CPU time in seconds."""
    started_s = time.process_time()
    made = work()
    return made, time.process_time() - started_s


if __name__ == "__main__":
    main()
