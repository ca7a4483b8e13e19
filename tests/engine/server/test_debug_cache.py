"""`/debug/cache`: what it shows, what it hides, and who may see it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import orjson
import pytest

from engine.cache.survey import MOST_PREFIXES
from tests.engine.server.conftest import Engine

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You answer about the harvest of rye and nothing else. " * 20}


def asked(word: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": word}]


async def test_it_shows_the_hot_prefix_by_length_and_digest_and_no_text(engine: Engine) -> None:
    for word in ("one", "two", "three"):
        await engine.ask(CHAT, messages=asked(word), max_tokens=2, cache_salt="secret-salt")
    text = await engine.text("/debug/cache?top=5")
    seen = orjson.loads(text)
    for hidden in ("harvest", "rye", "secret-salt"):
        assert hidden not in text
    hottest = seen["hottest"][0]
    _, whole = await engine.ask("/tokenize", messages=asked("one"))
    assert 0 < hottest["tokens"] <= whole["count"]
    assert hottest["uses"] >= 2
    assert sum(seen["blocks"].values()) == engine.service.scheduler.load().blocks_total
    assert seen["prompt_tokens_hit"] > 0
    assert seen["epoch"] == engine.service.epoch
    metrics = await engine.text("/metrics")
    cached = seen["blocks"]["idle"] + seen["blocks"]["used_cached"]
    assert f'warmroute_kv_blocks_cached{{model_name="tiny"}} {float(cached)}' in metrics


@pytest.mark.parametrize("top", ["-1", str(MOST_PREFIXES + 1), "x", "1.5", "", "9999999999", "٣"])
async def test_a_bad_top_is_refused_by_name(engine: Engine, top: str) -> None:
    async with engine.http.get(engine.url + "/debug/cache", params={"top": top}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "top"


async def test_many_at_once_are_answered_and_requests_go_on(engine: Engine) -> None:
    surveys: list[Coroutine[Any, Any, Any]] = [engine.text("/debug/cache") for _ in range(20)]
    *texts, (status, _) = await asyncio.gather(*surveys, engine.ask(CHAT, messages=asked("x"), max_tokens=3))
    assert status == 200
    assert all(orjson.loads(text)["tree"]["deepest_tokens"] >= 0 for text in texts)
