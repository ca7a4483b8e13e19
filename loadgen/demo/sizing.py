"""How much traffic this machine can bear. It is measured, so that the demo loads slow and fast machines alike."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from loadgen.load.calibrate import probe
from loadgen.load.client import Client

UTILISATION = 0.75
"""Share of the machine's capacity that round robin uses: loaded, not overloaded."""
EXPECTED_MISS = 0.6
"""Share of a system prompt's prefill that round robin pays per request with this pool: first visits and evictions."""
MAX_SESSION_RATE = 20.0
"""Sessions per second; a higher rate would measure the load generator, which shares the cores."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The cost of a request for the whole machine when all pods are busy."""

    cold_s: float
    """Seconds of prefill per uncached system prompt. With 4 pods on 2 cores, it is about half of what one pod takes."""
    answer_s: float
    """Seconds per short prompt with a full answer, decoded in a batch."""
    alone_s: float
    """TTFT in seconds of one uncached system prompt on an idle machine."""

    def session_rate(self, mean_turns: float) -> float:
        """Return the sessions per second that load round robin to `UTILISATION`, at most `MAX_SESSION_RATE`."""
        session_s = mean_turns * (EXPECTED_MISS * self.cold_s + self.answer_s)
        return min(MAX_SESSION_RATE, UTILISATION / session_s)


async def measure_pace(client: Client, pods: int, system_words: int, output_tokens: int) -> Pace:
    """Measure with unique prompts; the client's policy must spread them evenly. Raises ServerUnusable."""
    await _wall_s(client, "warm", pods, 20, 2)
    alone = await probe(client, "pace/alone", system_words, 1)
    assert alone.first_token_s is not None
    cold_s = await _wall_s(client, "cold", pods, system_words, 1) / pods
    answer_s = await _wall_s(client, "answer", 2 * pods, 20, output_tokens) / (2 * pods)
    return Pace(cold_s, answer_s, alone.first_token_s - alone.sent_s)


async def _wall_s(client: Client, seed: str, count: int, words: int, max_tokens: int) -> float:
    start_s = time.monotonic()
    await asyncio.gather(*(probe(client, f"pace/{seed}/{i}", words, max_tokens) for i in range(count)))
    return time.monotonic() - start_s
