"""Tokens per word, from the server's own usage."""

from __future__ import annotations

import asyncio

import pytest

from loadgen.load.calibrate import measure_tokens_per_word
from loadgen.load.client import Client
from loadgen.load.target import ServerUnusable, Target
from tests.loadgen.load.scripted_server import (
    DONE,
    LAST,
    STREAM_HEAD,
    Request,
    Script,
    ScriptedServer,
    chunk,
    plain,
    saying,
    stop,
    usage,
    word,
)


def counting(tokens_per_word: float, offset: int = 11) -> Script:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        words = len(request.fields["messages"][0]["content"].split())
        said = usage(offset + round(words * tokens_per_word), 1)
        writer.write(STREAM_HEAD + chunk(word("a") + stop() + said + DONE) + LAST)

    return script


async def measured(script: Script, **fields: str) -> float:
    async with ScriptedServer(script).running() as url, Client(Target(url, model="m", **fields)) as client:  # type: ignore[arg-type]
        return await measure_tokens_per_word(client, 1)


@pytest.mark.parametrize("tokens_per_word", [1.0, 1.37, 6.0])
async def test_the_template_does_not_count(tokens_per_word: float) -> None:
    assert await measured(counting(tokens_per_word)) == pytest.approx(tokens_per_word, abs=0.02)


async def test_servers_that_cannot_be_measured_say_why() -> None:
    with pytest.raises(ServerUnusable, match="no usage in streams: give --tokens-per-word"):
        await measured(saying(STREAM_HEAD + chunk(word("a") + stop() + DONE) + LAST))
    with pytest.raises(ServerUnusable, match="is 11 for a short, 11 for a long prompt"):
        await measured(counting(0.0))
    with pytest.raises(ServerUnusable, match="a short request with policy warm failed: http 400; unknown policy"):
        await measured(saying(plain(400, b"unknown policy")), policy="warm")
