"""Prompt tokens that each index saves, by kind of traffic and block size, and the CPU time for that.

    python -m tests.bench.engine.bench_prefix_cache

Requests come one after another, and the pool holds all of them. The figure is saved tokens / prompt tokens, over the
requests that could save any. The last token of a prompt is never saved, because its logits choose the next token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count

from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache

BLOCK_SIZES = (16, 32, 64, 128, 256)
POOL_TOKENS = 1 << 20
_VOCABULARY = 100_000


@dataclass(frozen=True)
class Served:
    """A request: its prompt, its answer, and whether its savings are counted."""

    prompt: list[int]
    answer: list[int]
    counts: bool = True


def text(rng: random.Random, tokens: int) -> list[int]:
    """Return random tokens: other texts have them in common only by chance."""
    return [rng.randrange(_VOCABULARY) for _ in range(tokens)]


def system_prompt(rng: random.Random) -> Iterator[Served]:
    """Yield one system prompt of 2,003 tokens, then a question of each user."""
    system = text(rng, 2003)
    for i in range(50):
        yield Served(system + text(rng, rng.randint(20, 200)), text(rng, rng.randint(20, 200)), i > 0)


def fifth_turn(rng: random.Random) -> Iterator[Served]:
    """Yield conversations of five turns with nothing in common; the fifth turn counts."""
    for _ in range(20):
        prompt = text(rng, rng.randint(50, 400))
        for turn in range(1, 6):
            answer = text(rng, rng.randint(50, 300))
            yield Served(prompt, answer, turn == 5)
            prompt = prompt + answer + text(rng, rng.randint(10, 100))


def overlap(rng: random.Random) -> Iterator[Served]:
    """Yield pairs of prompts of 2,000 tokens that have the first 1,500 in common; the second prompt counts."""
    for _ in range(20):
        shared = text(rng, 1500)
        for i in range(2):
            yield Served(shared + text(rng, 500), text(rng, 100), i == 1)


def regenerated(rng: random.Random) -> Iterator[Served]:
    """Yield a prompt, its answer regenerated twice, then its last question edited; all except the first count."""
    for _ in range(20):
        history, question = text(rng, rng.randint(300, 1500)), text(rng, rng.randint(10, 100))
        for i in range(3):
            yield Served(history + question, text(rng, 150), i > 0)
        yield Served(history + text(rng, 30), text(rng, 150))


def few_shot(rng: random.Random) -> Iterator[Served]:
    """Yield five of eight examples of about 150 tokens in any order, between 100 tokens of instructions and a
    question."""
    instructions = text(rng, 100)
    examples = [text(rng, rng.randint(100, 200)) for _ in range(8)]
    for i in range(100):
        chosen = rng.sample(examples, 5)
        yield Served([*instructions, *chain.from_iterable(chosen), *text(rng, 40)], text(rng, 30), i > 0)


TRAFFIC: dict[str, Callable[[random.Random], Iterator[Served]]] = {
    "identical system prompt": system_prompt,
    "fifth turn of a conversation": fifth_turn,
    "1,500 of 2,000 tokens in common": overlap,
    "regenerated answers": regenerated,
    "reordered few-shot examples": few_shot,
}


def saved(requests: list[Served], kind: IndexKind, block_size: int) -> tuple[int, float]:
    """Return the prompt tokens saved, and CPU seconds per request in the cache."""
    cache = PrefixCache(POOL_TOKENS // block_size, block_size, index=kind)
    tokens = 0
    start_s = time.process_time()
    for request in requests:
        sequence = cache.open(request.prompt)
        reused = cache.admit(sequence, len(request.prompt))
        assert reused is not None, "the pool is too small for one request"
        cache.commit(sequence, len(request.prompt), is_last=True)
        cache.append(sequence, request.answer)
        computed = len(request.prompt) + len(request.answer) - 1
        cache.extend(sequence, computed)
        cache.commit(sequence, computed, is_last=True)
        cache.release(sequence)
        tokens += reused * request.counts
    return tokens, (time.process_time() - start_s) / len(requests)


def most(requests: list[Served]) -> int:
    """Return the tokens that a cache without blocks would save: the longest prefix in common with earlier requests."""
    ids: dict[tuple[int, int], int] = {}
    numbers, total = count(1), 0
    for request in requests:
        node, known = 0, 0
        tokens = [*request.prompt, *request.answer[:-1]]
        for i, token in enumerate(tokens):
            following = ids.get((node, token))
            if following is None:
                following = ids[node, token] = next(numbers)
            elif i < len(request.prompt) - 1:
                known = i + 1
            node = following
        total += known * request.counts
    return total


def main() -> None:
    """Measure and print."""
    sizes = " | ".join(map(str, BLOCK_SIZES))
    print(f"| traffic | prompt tokens | could be saved | index | {sizes} | us a request, {BLOCK_SIZES[0]} |")
    print("|---|--:|--:|---|" + "--:|" * (len(BLOCK_SIZES) + 1))
    for name, traffic in TRAFFIC.items():
        requests = list(traffic(random.Random(1)))
        asked, bound = sum(len(r.prompt) for r in requests if r.counts), most(requests)
        for kind in (IndexKind.HASH, IndexKind.RADIX):
            results = [saved(requests, kind, size) for size in BLOCK_SIZES]
            cells = " | ".join(f"{tokens / asked:.1%}" for tokens, _ in results)
            print(
                f"| {name} | {asked:,} | {bound / asked:.1%} | {kind} | {cells} | {results[0][1] * 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
