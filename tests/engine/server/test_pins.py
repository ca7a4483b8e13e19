"""Prefixes that clients ask to keep stay in the cache, up to a share of the pool. Usage reports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.server.conftest import FAST, Engine, Start

TEXT = "The handbook says that pods restart when their probes fail thrice in a row. " * 8
MARK = {"type": "ephemeral"}
SMALL = replace(FAST, kv_tokens=1600)
"""A pool of 100 blocks."""
MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def asked(*content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 1, **more}


@asynccontextmanager
async def small(start: Start, **settings: Any) -> AsyncIterator[Engine]:
    """An engine with few blocks that keeps prompts of any length."""
    async with start(profile=SMALL, **settings) as engine:
        service = engine.service
        engine.state.service = replace(service, model=replace(service.model, least_kept_tokens=16))
        yield engine


async def flood(engine: Engine) -> None:
    """Send unrelated prompts until all unpinned older blocks are evicted."""
    for i in range(12):
        status, _ = await engine.ask("/v1/completions", prompt=[10 + i] * 400, max_tokens=1)
        assert status == 200


async def ask(engine: Engine, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    status, answer = await engine.ask(path, **fields)
    assert status == 200, answer
    usage: dict[str, Any] = answer["usage"]
    return usage


async def read_again(engine: Engine, fields: dict[str, Any]) -> int:
    """Return the request's cached tokens after a flood."""
    await flood(engine)
    return int((await ask(engine, MESSAGES, fields))["cache_read_input_tokens"])


async def test_a_marked_beginning_outlives_a_flood_and_another_does_not(start: Start) -> None:
    async with small(start) as engine:
        marked, plain = asked(part(TEXT, cache_control=MARK), part("Why?")), asked(part("Else: " + TEXT), part("Why?"))
        usage = await ask(engine, MESSAGES, marked)
        kept = usage["cache_creation_input_tokens"]
        assert kept > 100
        assert usage["unpinned_tokens"] == 0
        await ask(engine, MESSAGES, plain)
        assert await read_again(engine, plain) == 0
        assert await read_again(engine, marked) == kept // 16 * 16
        text = await engine.text("/metrics")
        assert f'warmroute_kv_blocks_pinned{{model_name="tiny"}} {kept // 16:.1f}' in text
        # Act as if five minutes had passed.
        engine.service.scheduler.advance(asyncio.get_running_loop().time() + 301)
        assert await read_again(engine, marked) == 0


async def test_what_is_beyond_the_share_is_served_and_told(start: Start) -> None:
    async with small(start, pin_share=0.05) as engine:
        usage = await ask(engine, MESSAGES, asked(part(TEXT, cache_control=MARK)))
        assert usage["cache_creation_input_tokens"] == 5 * 16
        whole = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        assert 0 < usage["unpinned_tokens"] < whole - 5 * 16
    async with small(start, pin_share=0) as engine:
        usage = await ask(engine, MESSAGES, asked(part(TEXT, cache_control=MARK)))
        assert (usage["cache_creation_input_tokens"], usage["unpinned_tokens"] > 100) == (0, True)


async def test_what_is_too_short_is_not_kept(start: Start) -> None:
    async with start(profile=SMALL) as engine:
        usage = await ask(engine, MESSAGES, asked(part(TEXT, cache_control=MARK)))
    assert usage["cache_creation_input_tokens"] == 0
    assert "unpinned_tokens" not in usage


async def test_pins_yield_to_a_request_that_needs_the_whole_pool(start: Start) -> None:
    async with small(start, pin_share=0.9) as engine:
        for i in range(3):
            await ask(engine, MESSAGES, asked(part(f"{i} {TEXT}", cache_control=MARK)))
        assert len(engine.service.scheduler.pins[0]) > 20
        status, _ = await engine.ask("/v1/completions", prompt=[9] * 1590, max_tokens=10)
        assert status == 200
        assert len(engine.service.scheduler.pins[0]) == 0


LONG = {"type": "ephemeral", "ttl": "2h"}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds. " * 30, "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        (asked(part(TEXT, cache_control={"type": "ephemeral", "ttl": "1h"}), part("Why?")), 100),
        (asked(part("Why?"), tools=[{**TOOL, "cache_control": MARK}]), 60),
        (asked(part(TEXT), prompt_cache_retention="24h"), 100),
    ],
    ids=["part", "tool", "retention"],
)
async def test_chats_have_marks_too(start: Start, fields: dict[str, Any], least: int) -> None:
    plain = {**fields, "tools": [TOOL]} if "tools" in fields else fields
    async with small(start) as engine:
        details = (await ask(engine, CHAT, fields))["prompt_tokens_details"]
        kept = details["created_cache_tokens"]
        assert kept > least
        assert (details["cached_tokens"], details["unpinned_tokens"]) == (0, 0)
        await flood(engine)
        # A mark is not rendered, so the same request without it finds the kept tokens.
        warm = (await ask(engine, CHAT, plain))["prompt_tokens_details"]
        assert kept - 16 <= warm["cached_tokens"] <= kept
        assert warm.get("created_cache_tokens", 0) <= 16


async def test_a_chat_with_tools_outlives_a_flood_until_its_result_comes(start: Start) -> None:
    question = {"role": "user", "content": TEXT}
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    turns = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": "Found.", "tool_call_id": "c1"}
    async with small(start, keep_share=0.5, pin_min_tokens=16) as engine:
        asked = {"messages": [question], "max_tokens": 4}
        await ask(engine, CHAT, {**asked, "tools": [TOOL]})
        kept = len(engine.service.scheduler.pins[1])
        assert kept > 10
        await ask(engine, CHAT, {**asked, "tools": [TOOL], "tool_choice": "none", "cache_salt": "other"})
        await ask(engine, CHAT, {**asked, "cache_salt": "third"})
        assert len(engine.service.scheduler.pins[1]) == kept, "without a tool call, no tool result will follow"
        await flood(engine)
        usage = await ask(engine, CHAT, {"messages": [*turns, result], "tools": [TOOL], "max_tokens": 4})
        assert usage["prompt_tokens_details"]["cached_tokens"] > 160
        text = await engine.text("/metrics")
        assert 'warmroute_kv_blocks_kept_unasked{model_name="tiny"}' in text


async def test_completions_are_kept_as_long_as_they_ask(start: Start) -> None:
    async with small(start) as engine:
        fields = {"prompt": [7] * 200, "max_tokens": 1, "prompt_cache_retention": "24h"}
        assert (await ask(engine, "/v1/completions", fields))["prompt_tokens_details"]["created_cache_tokens"] == 192
        await flood(engine)
        assert (await ask(engine, "/v1/completions", fields))["prompt_tokens_details"]["cached_tokens"] == 192


async def test_a_tenant_neither_reads_nor_renews_what_another_keeps(start: Start) -> None:
    async with small(start) as engine:
        mine = asked(part(TEXT, cache_control=MARK), cache_salt="mine")
        theirs = asked(part(TEXT), cache_salt="theirs")
        kept = (await ask(engine, MESSAGES, mine))["cache_creation_input_tokens"]
        now_s = asyncio.get_running_loop().time()
        assert await read_again(engine, theirs) == 0
        engine.service.scheduler.advance(now_s + 290)  # the pin is still there ...
        assert len(engine.service.scheduler.pins[0]) == kept // 16
        engine.service.scheduler.advance(now_s + 301)  # ... and now it is gone: the other tenant did not renew it
        assert len(engine.service.scheduler.pins[0]) == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (asked(part("x", cache_control={"type": "forever"})), "messages[0].content[0].cache_control.type"),
        (asked(part("x", cache_control=3)), "messages[0].content[0].cache_control"),
        (
            asked(part("x"), tools=[{**TOOL, "cache_control": LONG}]),
            "tools[0].cache_control.ttl",
        ),
        (asked(*[part("x", cache_control=MARK)] * 5), "cache_control"),
        (asked(part("x"), prompt_cache_retention="8h"), "prompt_cache_retention"),
    ],
)
async def test_marks_that_say_nothing_are_refused(engine: Engine, fields: dict[str, Any], param: str) -> None:
    status, answer = await engine.ask(CHAT, **fields)
    assert (status, answer["error"]["param"]) == (400, param)
