"""Texts that came before are not tokenized again, and no answer or count shows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine.text.token_cache import TokenCache
from tests.engine.server.conftest import Engine, Start

TEXT = "The handbook says that pods restart when their probes fail. " * 40
CASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
}


@pytest.fixture
async def fresh(start: Start) -> AsyncIterator[Engine]:
    """Start an engine with an empty token cache of its own."""
    async with start() as engine:
        model = engine.service.model
        cache = TokenCache(model.tokenizer, 2**20)
        engine.state.service = replace(engine.service, model=replace(model, token_cache=cache))
        yield engine


def cache_of(engine: Engine) -> TokenCache:
    return engine.service.model.token_cache


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["prompt_tokens"] if "prompt_tokens" in usage else _of_messages_or_responses(usage))


def _of_messages_or_responses(usage: dict[str, Any]) -> int:
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in names)


@pytest.mark.parametrize("path", CASES)
async def test_each_api_takes_tokens_from_the_cache_and_counts_the_same(fresh: Engine, path: str) -> None:
    counts, hits = [], []
    for _ in range(3):
        status, answer = await fresh.ask(path, **CASES[path])
        assert status == 200, answer
        counts.append(prompt_tokens(answer))
        hits.append(cache_of(fresh).hit_chars)
    assert len(set(counts)) == 1
    assert hits[:2] == [0, 0]
    assert hits[2] > 0.8 * len(TEXT)


async def test_salts_are_kept_apart(fresh: Engine) -> None:
    path, fields = next(iter(CASES.items()))
    for salt in ("one", "one", "another", None):
        await fresh.ask(path, **fields, **({"cache_salt": salt} if salt else {}))
    assert cache_of(fresh).hit_chars == 0
    await fresh.ask(path, **fields, cache_salt="one")
    assert cache_of(fresh).hit_chars > 0


async def test_counting_tokens_neither_reads_nor_fills_it(fresh: Engine) -> None:
    fields = {"messages": [{"role": "user", "content": TEXT}]}
    counts = [(await fresh.ask("/v1/messages/count_tokens", **fields))[1]["input_tokens"] for _ in range(3)]
    assert len(set(counts)) == 1
    assert (cache_of(fresh).bytes, cache_of(fresh).hit_chars) == (0, 0)


async def test_a_reset_empties_it_and_metrics_show_it(fresh: Engine) -> None:
    for _ in range(3):
        await fresh.ask("/v1/completions", prompt=TEXT, max_tokens=1)
    page = await fresh.text("/metrics")
    assert f'warmroute_token_cache_bytes{{model_name="tiny"}} {cache_of(fresh).bytes}.0' in page
    assert f'warmroute_token_cache_hit_characters_total{{model_name="tiny"}} {cache_of(fresh).hit_chars}.0' in page
    assert cache_of(fresh).bytes > 0
    await fresh.ask("/reset_prefix_cache")
    assert cache_of(fresh).bytes == 0
