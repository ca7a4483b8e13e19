"""A scheduler and a sim backend in virtual time: prints every step's time and every token, as one JSON line.

python -m tests.engine.sim.virtual_run SEED
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import looptime

from engine.backend.profiles import PROFILES
from engine.backend.sim import SimBackend
from engine.cache.prefix_cache import PrefixCache
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig


async def play(seed: int) -> dict[str, list[object]]:
    """Serve forty requests with a pool too small for all of them."""
    generator = random.Random(1)
    scheduler = Scheduler(PrefixCache(200, 16), SchedulerConfig(512, 16, 64))
    backend, loop = SimBackend(PROFILES["l4-8b"], vocab_size=1000, seed=seed), asyncio.get_running_loop()
    for i in range(40):
        prompt = [i % 3] * 256 + [i] * generator.randrange(1, 300)
        scheduler.add(Request(i, prompt, generator.randrange(1, 30), sampling=SamplingParams(seed=i)))
    ends_s: list[object] = []
    tokens: list[object] = []
    while (plan := scheduler.schedule()) is not None:
        result = await backend.run(plan)
        ends_s.append(loop.time())
        tokens += [[o.request_id, o.token.token] for o in scheduler.complete(result) if o.token]
    await backend.close()
    return {"ends_s": ends_s, "tokens": tokens}


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        print(json.dumps(runner.run(play(int(sys.argv[1])))))
