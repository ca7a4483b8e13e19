"""Which clients may use the gateway, and what the engines see of a client's key."""

# ruff: noqa: ASYNC240  # the files are tiny

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from blockbuster import BlockBuster
from hypothesis import given
from hypothesis import strategies as st

from engine.common import files
from engine.common.api_keys import KeyFileError, parse_keys
from engine.common.files import FollowedFile, UnusableFile
from router.edge.client_keys import ClientKeys
from router.edge.errors import Unauthorized
from tests.router.rig.helpers import Gateway, ScriptedEngine, event, eventually, running, streams

STREAM = {"model": "m", "prompt": "x", "stream": True}
GOOD = streams([event("a"), b"data: [DONE]\n\n"])
PATHS = ("/v1/models", "/v1/pods", "/metrics", "/nothing")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path: Path, no_blocking_calls: BlockBuster) -> Path:
    """Return a file with two keys among lines that are not keys."""
    no_blocking_calls.deactivate()  # the tests themselves write the file
    path = tmp_path / "keys"
    path.write_text("# team a\nkey-a\n\n  key-b  \n")
    return path


async def get(gateway: Gateway, path: str, **sent: str) -> tuple[int, Any]:
    async with gateway.session.get(gateway.url + path, headers=sent) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_nothing_passes_without_a_key_but_what_machines_ask(key_file: Path) -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, api_keys_file=str(key_file)) as gateway:
        wrong = [*map(bearer, ("key-c", "key-", "", "# team a")), {"Authorization": "Basic key-a"}]
        for sent in ({}, *wrong):
            for path in ("/v1/completions", "/v1/chat/completions"):
                answer = await gateway.post(STREAM, path=path, **sent)
                error = answer.json["error"]
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert error["type"] == "invalid_request_error"
                assert error["code"] == ("invalid_api_key" if sent else "missing_api_key")
            for path in PATHS:
                assert (await get(gateway, path, **sent))[0] == 401
        assert not engine.received
        assert not engine.resets
        for path in ("/health", "/ready"):
            assert (await get(gateway, path))[0] == 200
        for key in ("key-a", "key-b"):
            assert (await gateway.post(STREAM, **bearer(key))).status == 200
            assert (await get(gateway, "/v1/models", **bearer(key)))[0] == 200
        text = (await gateway.get("/metrics")).body.decode()
    assert "warmroute_gateway_unauthorized_total 36.0" in text
    assert "Authorization" not in engine.received[0].headers, "the gateway's keys are none of the engines' business"


async def test_the_official_client_takes_it_for_what_it_is(key_file: Path) -> None:
    async with running(ScriptedEngine("a", GOOD), api_keys_file=str(key_file)) as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="not valid here"):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-a", max_retries=0) as client:
            assert [model.id for model in (await client.models.list()).data] == ["m"]


async def test_rotated_keys_take_effect_and_an_unusable_file_changes_nothing(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "REREAD_S", 0.02)
    async with running(ScriptedEngine("a", GOOD), api_keys_file=str(key_file)) as gateway:

        async def until(key: str, status: int) -> None:
            async with asyncio.timeout(10):
                while (await gateway.post(STREAM, **bearer(key))).status != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        fresh = key_file.with_name("fresh")
        fresh.write_text("key-c\n")
        fresh.replace(key_file)
        await until("key-c", 200)
        assert (await gateway.post(STREAM, **bearer("key-a"))).status == 401
        key_file.write_text("")
        await eventually(lambda: "holds no key" in caplog.text)
        key_file.unlink()
        await eventually(lambda: "cannot be read" in caplog.text)
        assert (await gateway.post(STREAM, **bearer("key-c"))).status == 200
        key_file.write_text("key-d")
        await until("key-d", 200)
        await until("key-c", 401)


async def test_without_keys_the_clients_credentials_are_the_engines(no_blocking_calls: BlockBuster) -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        await gateway.post(STREAM, **bearer("the client's own"))
    assert engine.received[0].headers["Authorization"] == "Bearer the client's own"


class ProtectedEngine(ScriptedEngine):
    """Requires the key on every path, as vLLM with --api-key does under /v1."""

    async def _models(self, request: web.Request) -> web.Response:
        self._check(request)
        return await super()._models(request)

    async def _reset(self, request: web.Request) -> web.Response:
        self._check(request)
        return await super()._reset(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        return await super()._generate(request)

    @staticmethod
    def _check(request: web.Request) -> None:
        if request.headers.getall("Authorization", []) != ["Bearer engine-key"]:
            raise web.HTTPUnauthorized


@pytest.mark.parametrize("has_client_keys", [True, False])
async def test_engines_are_shown_their_own_key(key_file: Path, tmp_path: Path, has_client_keys: bool) -> None:
    engine_key = tmp_path / "engine-key"
    engine_key.write_text("engine-key\n")
    settings: dict[str, Any] = {"engine_api_key_file": str(engine_key)}
    if has_client_keys:
        settings["api_keys_file"] = str(key_file)
    async with running(ProtectedEngine("a", GOOD), **settings) as gateway:
        assert (await gateway.post(STREAM, **bearer("key-a"))).status == 200
        assert (await gateway.post(b"", path="/reset_prefix_cache")).status == 200


async def test_two_engine_keys_are_one_too_many(key_file: Path) -> None:
    with pytest.raises(KeyFileError, match="--engine-api-key-file must hold one key, not 2"):
        async with running(ScriptedEngine("a", GOOD), engine_api_key_file=str(key_file)):
            pass


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"", "holds no key"),
        (b"# k\n \n", "holds no key"),
        (b"a\nb c\n", "line 2"),
    ],
)
async def test_what_is_no_key_file_is_said_without_its_content(
    key_file: Path, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "other"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnusableFile, match=said) as refused:
        await FollowedFile("keys", path, parse_keys, lambda keys: None).load()
    assert str(path) in str(refused.value)
    assert "b c" not in str(refused.value)


KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1).filter(lambda k: k[0] != "#")


@given(st.lists(KEYS, min_size=1), KEYS)
def test_exactly_the_keys_are_admitted(known: list[str], other: str) -> None:
    keys = ClientKeys()
    keys.use(known)
    for key in known:
        keys.admit(f"Bearer {key}")
        keys.admit(f"bearer {key}")
    if other not in known:
        with pytest.raises(Unauthorized):
            keys.admit(f"Bearer {other}")
    for shown in (None, "", "Bearer", "Bearer ", known[0], f"Basic {known[0]}", f"Bearer{known[0]}"):
        with pytest.raises(Unauthorized):
            keys.admit(shown)


async def test_an_unchanged_file_is_handed_over_once(key_file: Path) -> None:
    used: list[Any] = []
    file = FollowedFile("keys", key_file, parse_keys, used.append)
    for _ in range(3):
        await file.load()
    key_file.write_text(key_file.read_text() + f"# {time.time()}\n")
    await file.load()
    assert used == [("key-a", "key-b")]
