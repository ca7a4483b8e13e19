"""The table's traffic: prompts of a few long prefixes with a short question each, and their reusable tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WORDS = (
    *("harbour", "lantern", "copper", "meadow", "signal", "winter", "orchard", "bridge", "thunder", "pocket"),
    *("village", "candle", "mirror", "river", "garden", "silver", "mountain", "letter", "window", "market"),
    *("forest", "shadow", "engine", "valley", "summer", "castle", "anchor", "pepper"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `prefix`: number of the prefix of its prompt. `gateway`: number of the gateway that gets it."""

    number: int
    prefix: int
    gateway: int
    prompt: str


@dataclass(frozen=True, slots=True)
class Workload:
    """`prefixes` texts of `prefix_words` words, asked `requests` times in all, equally often, in random order."""

    requests: int
    gateways: int = 1
    prefixes: int = 24
    prefix_words: int = 505
    seed: int = 1

    def asks(self) -> list[Ask]:
        """The requests, in order."""
        rng = random.Random(self.seed)
        texts = [f"{i:02d} " + " ".join(rng.choices(WORDS, k=self.prefix_words)) for i in range(self.prefixes)]
        order = [i % self.prefixes for i in range(self.requests)]
        rng.shuffle(order)
        return [
            Ask(
                number,
                prefix,
                rng.randrange(self.gateways),
                f"{texts[prefix]}\nQuestion {number:04d}: " + " ".join(rng.choices(WORDS, k=6)),
            )
            for number, prefix in enumerate(order)
        ]


def attainable(prompts: Iterable[Sequence[int]], block_tokens: int) -> int:
    """Return the tokens that would be reused if nothing were computed twice: whole blocks that an earlier prompt had.

    An engine computes at least the last token of a prompt, so a block that holds it is not reused.
    """
    seen: set[tuple[int, ...]] = set()
    reused = 0
    for tokens in prompts:
        whole = [tuple(tokens[:end]) for end in range(block_tokens, len(tokens) + 1, block_tokens)]
        usable = [block for block in whole if len(block) < len(tokens)]
        hits = next((i for i, block in enumerate(usable) if block not in seen), len(usable))
        reused += hits * block_tokens
        seen.update(whole)
    return reused


def shared_tokens(asks: Sequence[Ask], prompts: Sequence[Sequence[int]]) -> int:
    """Return the fewest leading tokens that two requests of one prefix share. `prompts`: the requests' tokens."""
    first: dict[int, Sequence[int]] = {}
    shared = min(map(len, prompts))
    for ask, tokens in zip(asks, prompts, strict=True):
        other = first.setdefault(ask.prefix, tokens)
        common = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), len(tokens))
        shared = min(shared, common)
    return shared
