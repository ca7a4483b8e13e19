"""Token counts without a tokenizer: the server's own `usage` tells how many tokens a word has."""

from __future__ import annotations

from loadgen.load.client import Client
from loadgen.load.target import ServerUnusable
from loadgen.measure.records import RequestRecord
from loadgen.workloads.words import Phrasebook

SHORT_WORDS, LONG_WORDS = 100, 500


async def probe(client: Client, seed: str, words: int, max_tokens: int) -> RequestRecord:
    """Send a request of `words` words that no workload contains, and return its record. The request must succeed.

    Raises ServerUnusable, which says how the request failed.
    """
    text = Phrasebook().prose(f"probe/{seed}", words)
    record, _ = await client.send(client.call([{"role": "user", "content": text}], max_tokens))
    if record.failure:
        about = f" with policy {client.target.policy}" if client.target.policy else ""
        raise ServerUnusable(
            f"{client.target.origin}: a short request{about} failed: {record.failure}; {record.detail}"
        )
    return record


async def measure_tokens_per_word(client: Client, seed: int) -> float:
    """Return the tokens per word of `Phrasebook.prose`. Raises ServerUnusable if streams report no usage."""
    short = await probe(client, f"{seed}/short", SHORT_WORDS, 1)
    long = await probe(client, f"{seed}/long", LONG_WORDS, 1)
    if not (short.has_usage and long.has_usage):
        raise ServerUnusable("the server reports no usage in streams: give --tokens-per-word (about 1.4 for English)")
    tokens_per_word = (long.prompt_tokens - short.prompt_tokens) / (LONG_WORDS - SHORT_WORDS)
    if tokens_per_word <= 0:
        raise ServerUnusable(
            f"usage.prompt_tokens is {short.prompt_tokens} for a short, {long.prompt_tokens} for a long prompt:"
            " give --tokens-per-word (about 1.4 for English)"
        )
    return round(tokens_per_word, 2)
