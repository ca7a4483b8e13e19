"""Token counts without a tokenizer: the server's own `usage` says what a word costs."""

from __future__ import annotations

import asyncio
import random

from loadgen.client import ChatCall, ChatClient, RequestRecord, ServerUnusable
from loadgen.words import prose

SHORT_WORDS, LONG_WORDS = 100, 500


def probe_call(seed: str, words: int, max_tokens: int) -> ChatCall:
    """A request to send now, outside any session, whose prompt no workload contains."""
    text = f"Probe {seed}. {prose(random.Random(f'probe/{seed}'), words)}"
    now_s = asyncio.get_running_loop().time()
    return ChatCall(-1, 0, None, [{"role": "user", "content": text}], max_tokens, now_s)


async def probe(client: ChatClient, call: ChatCall, policy: str = "") -> RequestRecord:
    """The record of a request that must succeed. Raises ServerUnusable."""
    record, _ = await client.send(call, policy=policy)
    if record.failure:
        about = f" with policy {policy}" if policy else ""
        raise ServerUnusable(f"a short request{about} failed: {record.failure}; {record.detail}")
    return record


async def measure_tokens_per_word(client: ChatClient, seed: int) -> float:
    """Tokens per word of this package's prose. Raises ServerUnusable where the server reports no usage."""
    short = await probe(client, probe_call(f"{seed}/short", SHORT_WORDS, 1))
    long = await probe(client, probe_call(f"{seed}/long", LONG_WORDS, 1))
    if not (short.has_usage and long.has_usage):
        raise ServerUnusable("the server reports no usage in streams: give --tokens-per-word (about 1.4 for English)")
    tokens_per_word = (long.prompt_tokens - short.prompt_tokens) / (LONG_WORDS - SHORT_WORDS)
    if tokens_per_word <= 0:
        raise ServerUnusable(
            f"usage.prompt_tokens is {short.prompt_tokens} for a short, {long.prompt_tokens} for a long prompt"
        )
    return round(tokens_per_word, 2)
