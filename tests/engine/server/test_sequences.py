"""The choices of a request have their own seeds, and their prompt is hashed once."""

from __future__ import annotations

import threading

import orjson
import pytest

import engine.cache.sequence as cache_sequence
from engine.cache.hashing import chain_digest
from engine.contract.requests import Endpoint
from engine.server.requests import prepare
from tests.engine.server.conftest import Engine

TEXT = "/v1/completions"


def seeds_of(engine: Engine, **fields: object) -> list[int]:
    job = prepare(engine.service.model, Endpoint.COMPLETIONS, orjson.dumps(fields))
    return [request.sampling.seed for request in engine.service.sequences(job)[0]]


async def test_without_a_seed_every_choice_of_equal_prompts_has_its_own(engine: Engine) -> None:
    seeds = seeds_of(engine, prompt=["a b"] * 3, n=2)
    assert len(seeds) == len(set(seeds)) == 6
    _, body = await engine.ask(TEXT, prompt=["a b"] * 3, n=2, max_tokens=12)
    assert len({choice["text"] for choice in body["choices"]}) == 6


async def test_with_a_seed_equal_prompts_have_equal_answers(engine: Engine) -> None:
    seeds = seeds_of(engine, prompt=["a b"] * 3, n=2, seed=4)
    assert seeds == seeds_of(engine, prompt="a b", n=2, seed=4) * 3
    assert seeds[0] == 4 != seeds[1]


async def test_a_prompt_is_hashed_once_for_all_its_choices_and_not_on_the_event_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def spy(parent: bytes, tokens: bytes) -> bytes:
        threads.append(threading.get_ident())
        return chain_digest(parent, tokens)

    monkeypatch.setattr(cache_sequence, "chain_digest", spy)
    prompts = [list(range(160)), list(range(100, 180))]
    _, first = await engine.ask(TEXT, prompt=prompts, n=4, max_tokens=1)
    assert len(threads) == (160 + 80) // 16
    assert threading.get_ident() not in threads
    _, again = await engine.ask(TEXT, prompt=prompts, n=4, max_tokens=1)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 159 + 79, "all but each prompt's last token"
