"""The memory of bodies is bounded over all requests, and large bodies keep no small one out."""

from __future__ import annotations

import asyncio
import io
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from engine.server.http.wire import SMALL_BODY_BYTES, BodyRoom
from tests.engine.server.conftest import Engine, wait_until

MIB = 2**20
PATHS = ["/v1/completions", "/v1/messages/count_tokens", "/tokenize", "/detokenize"]


async def ask(engine: Engine, path: str, size: int) -> tuple[int, dict[str, Any], str | None]:
    """Send a body of `size` bytes, mostly white space around an empty object."""
    body = io.BytesIO(b"{" + b" " * (size - 2) + b"}")
    async with engine.http.post(engine.url + path, data=body) as response:
        return response.status, orjson.loads(await response.read()), response.headers.get("Retry-After")


async def begin(engine: Engine, arrived: int) -> asyncio.StreamWriter:
    """Send a part of a body."""
    url = urlsplit(engine.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n" % (8 * MIB))
    writer.write(b" " * arrived)
    await writer.drain()
    return writer


@pytest.mark.parametrize("path", PATHS)
async def test_while_large_bodies_arrive_a_further_one_is_refused_and_a_small_one_is_not(
    engine: Engine, path: str
) -> None:
    engine.state.bodies = BodyRoom(2 * MIB)
    writer = await begin(engine, 2 * MIB)
    counted = 2 * MIB - SMALL_BODY_BYTES
    await wait_until(lambda: engine.state.bodies.bytes == counted)
    status, answer, retry_after = await ask(engine, path, MIB)
    assert (status, retry_after) == (429, "1"), answer
    assert "too many large requests" in answer["error"]["message"]
    assert (await ask(engine, path, SMALL_BODY_BYTES))[0] == 400  # it is read, and lacks all fields
    assert engine.state.bodies.bytes == counted
    writer.close()
    await writer.wait_closed()
    await wait_until(lambda: engine.state.bodies.bytes == 0)
    assert (await ask(engine, path, MIB))[0] == 400
    assert engine.state.bodies.bytes == 0


async def test_a_body_no_longer_counts_while_its_answer_is_generated(engine: Engine) -> None:
    prompt = orjson.dumps({"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True})
    async with engine.http.post(engine.url + PATHS[0], data=io.BytesIO(b" " * MIB + prompt)) as response:
        assert await response.content.readline()
        assert engine.state.bodies.bytes == 0
