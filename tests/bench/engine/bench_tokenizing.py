"""What it costs an engine to turn a chat's body into tokens, with and without the cache of tokens.

    python -m tests.bench.engine.bench_tokenizing [--sizes 2 8 32 128] [--requests 60]

Each body has a system prompt of the given size and a question of 200 characters. "No cache" is --token-cache-mib 0.
With the cache, the system prompts are either all different ("unique") or the same ("shared"). The time is all of
`prepare`: parsing, rendering, tokenizing, prefix keys. Each round measures all three. The table has medians.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from engine.contract.requests import Endpoint
from engine.model.checkpoint import make_checkpoint
from engine.server.requests import ModelText, prepare
from engine.startup.app import load
from engine.startup.settings import EngineSettings
from engine.text.token_cache import TokenCache

SEED, QUESTION_CHARS, CACHE_BYTES = 1, 200, 64 * 2**20


def model_text() -> ModelText:
    """Return the text side of an engine with the tokenizer that the project trains."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        make_checkpoint(path, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, max_position=2**18)
        settings = EngineSettings(model=path, device="sim", kv_pool_tokens=2**18)
        return load(settings).text


class Texts:
    """Random English-like texts."""

    def __init__(self) -> None:
        self._draw = random.Random(SEED)
        letters = "etaoinshrdlucmfwypvbgk"
        self._words = ["".join(self._draw.choices(letters, k=self._draw.randint(2, 9))) for _ in range(5000)]

    def text(self, chars: int) -> str:
        """Return a text of this many characters."""
        return " ".join(self._draw.choices(self._words, k=chars // 3))[:chars]

    def body(self, system: str) -> bytes:
        """Return a chat's body with this system prompt and a new question."""
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": self.text(QUESTION_CHARS)},
        ]
        return orjson.dumps({"messages": messages, "max_tokens": 8})


def milliseconds(model: ModelText, body: bytes) -> float:
    """Return how long one request takes."""
    began_s = time.perf_counter()
    prepare(model, Endpoint.CHAT, body)
    return (time.perf_counter() - began_s) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 32, 128], help="KB of the system prompt")
    parser.add_argument("--requests", type=int, default=60, help="requests of each kind and size")
    given = parser.parse_args()
    text, texts = model_text(), Texts()
    plain, unique, shared = (
        replace(text, token_cache=TokenCache(text.tokenizer, size)) for size in (0, CACHE_BYTES, CACHE_BYTES)
    )
    print("| system prompt, KB | no cache, ms | unique, ms | shared, ms | unique / no cache | no cache / shared |")
    print("|---|---|---|---|---|---|")
    for size in given.sizes:
        system = texts.text(size * 1000)
        times: list[tuple[float, float, float]] = []
        for _ in range(given.requests):
            other = texts.body(texts.text(size * 1000))
            same = texts.body(system)
            times.append((milliseconds(plain, same), milliseconds(unique, other), milliseconds(shared, same)))
        none, once, again = np.median(np.array(times), axis=0)
        print(
            f"| {size} | {none:.2f} | {once:.2f} | {again:.2f} | {once / none:.2f} | {none / again:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
