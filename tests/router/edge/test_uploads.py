"""Uploads of recordings stream to an engine: whole, to the right model, no faster than the engine reads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from blockbuster import BlockBuster

from engine.common.sse import sse_event
from router.edge import body
from router.reading.upload import KEPT_BYTES
from router.startup.parts import ADMISSION
from tests.router.rig.forms import TYPE, Part, fields_of, written
from tests.router.rig.helpers import DEADLINE_S, Gateway, ScriptedEngine, answers, drops, eventually, running
from tests.router.rig.raw_client import connected, head

PATH = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
MIB = 2**20
SOUND = bytes(range(256)) * 400
WORDS = ["Four ", "score ", "and seven."]


async def listens(request: web.Request) -> web.StreamResponse:
    """Answer as vLLM and OpenAI do, and report what was heard."""
    fields = await fields_of(request)
    heard = {name: part.value.decode() for name, part in fields.items() if part.filename is None}
    if heard.get("stream") in ("true", "True"):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for word in WORDS:
            event = {"type": "transcript.text.delta", "delta": word}
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        done = {"type": "transcript.text.done", "text": "".join(WORDS)}
        await response.write(b"data: " + orjson.dumps(done) + b"\n\n" + sse_event(b"[DONE]"))
        return response
    file = fields["file"]
    said = {"text": "".join(WORDS), "heard": heard, "digest": sha256(file.value).hexdigest(), "file": file.filename}
    return web.json_response(said)


def form(*parts: Part, model: str | None = "m", sound: bytes = SOUND) -> bytes:
    named = [] if model is None else [Part("model", model.encode())]
    return written([*named, *parts, Part("file", sound, "a.wav", "audio/wav")])


def late(model: str, sound: bytes = SOUND) -> bytes:
    """Return a form with the model after the file, as curl and the JavaScript client write it."""
    return written([Part("file", sound, "a.wav", "audio/wav"), Part("model", model.encode())])


async def send(gateway: Gateway, form: bytes, *, path: str = PATH, **more: str) -> Any:
    return await gateway.post(form, path=path, **{"Content-Type": TYPE.decode(), **more})


def client_of(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def test_the_official_client_transcribes_translates_and_listens(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    engines = [ScriptedEngine("a", listens, models=["whisper"]), ScriptedEngine("b", answers(200), models=["m"])]
    async with running(*engines, model_alias=["whisper-1=whisper"]) as gateway, client_of(gateway) as client:
        file = ("speech.wav", SOUND, "audio/wav")
        said = await client.audio.transcriptions.create(file=file, model="whisper-1", language="en", prompt="Ü, so.")
        assert said.text == "".join(WORDS)
        told: Any = said.model_extra
        assert told["heard"] == {"model": "whisper", "language": "en", "prompt": "Ü, so."}
        assert (told["digest"], told["file"]) == (sha256(SOUND).hexdigest(), "speech.wav")
        with pytest.warns(DeprecationWarning, match="deprecated"):
            translated = await client.audio.translations.create(file=file, model="whisper-1")
        assert translated.text == "".join(WORDS)
        assert [one.path for one in engines[0].received] == [PATH, TRANSLATIONS]
        words, last = "", ""
        async for event in await client.audio.transcriptions.create(file=file, model="whisper", stream=True):
            if event.type == "transcript.text.delta":
                words += event.delta
            elif event.type == "transcript.text.done":
                last = event.text
        assert words == last == "".join(WORDS)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.audio.transcriptions.create(file=file, model="whisper-2")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        metrics = (await gateway.get("/metrics")).body.decode()
    assert engines[1].received == []
    assert 'engine="a",policy="round_robin",status="200"' in metrics or 'status="200"' in metrics


@pytest.mark.parametrize("sent", [form(), form(model=None), late("m"), late("")])
async def test_a_form_may_name_its_model_anywhere_or_nowhere_if_there_is_only_one(sent: bytes) -> None:
    async with running(ScriptedEngine("a", listens)) as gateway:
        answer = await send(gateway, sent)
    assert (answer.status, answer.json["heard"]) == (200, {"model": "m"})
    assert answer.json["digest"] == sha256(SOUND).hexdigest()


async def test_with_several_models_the_form_is_held_until_it_names_one() -> None:
    engines = [ScriptedEngine("a", listens, models=["a"]), ScriptedEngine("b", listens, models=["b"])]
    settings: dict[str, Any] = {"model_alias": ["x=b"], "max_body_bytes": MIB, "max_in_flight_body_mib": 4}
    async with running(*engines, **settings) as gateway:
        for asked, model in (("a", "a"), ("b", "b"), ("x", "b")):
            answer = await send(gateway, late(asked, bytes(MIB // 2)))
            assert (answer.status, answer.pod, answer.json["heard"]) == (200, model, {"model": model})
        none = await send(gateway, form(model=None))
        assert (none.status, none.json["error"]["param"]) == (400, "model")
        large = await send(gateway, late("a", bytes(3 * MIB)))
        assert (large.status, large.json["error"]["param"]) == (400, "model")
        assert "model before file" in large.json["error"]["message"]
        assert (await send(gateway, form(model="a", sound=bytes(3 * MIB)))).status == 200, (
            "if a form begins with its model, the gateway does not hold the file"
        )


async def test_a_late_model_that_is_another_one_ends_the_upload() -> None:
    engine = ScriptedEngine("a", listens)
    async with running(engine, max_upload_mib=4) as gateway:
        answer = await send(gateway, late("other"))
        assert (answer.status, answer.json["error"]["param"]) == (404, "model")
        twice = await send(gateway, written([Part("model", b"m"), Part("file", SOUND, "a"), Part("model", b"m")]))
        assert (twice.status, twice.json["error"]["param"]) == (400, "model")
        assert engine.received == [], "an engine took a part of a form for the whole"
        large = await send(gateway, form(sound=bytes(5 * MIB)))
        assert (large.status, large.json["error"]["param"]) == (413, "file")


@pytest.mark.parametrize(
    ("sent", "fields", "status"),
    [
        (b"{}", {"Content-Type": "application/json"}, 400),
        (b"hello", {}, 400),
        (form()[:-4], {}, 400),
        (form()[:500], {}, 400),
        (form(), {"Content-Encoding": "gzip"}, 415),
        (form(), {"x-warmroute-priority": "x"}, 400),
    ],
)
async def test_a_broken_form_is_an_error_in_the_shape_of_the_api(
    sent: bytes, fields: dict[str, str], status: int
) -> None:
    engine = ScriptedEngine("a", listens)
    async with running(engine) as gateway:
        answer = await send(gateway, sent, **fields)
        assert (answer.status, answer.json["error"]["type"]) == (status, "invalid_request_error")
        assert answer.json["error"]["message"]
        assert (await send(gateway, form())).status == 200
    assert len(engine.received) == 1


async def test_a_form_that_stops_coming_is_a_408_and_the_engine_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 0.3)
    async with running(ScriptedEngine("a", listens)) as gateway, connected(gateway) as client:
        sent = form(sound=bytes(4 * MIB))
        client.send(head(b"Content-Length: %d" % len(sent), b"Content-Type: " + TYPE, path=PATH.encode()))
        client.send(sent[: 2 * MIB])
        answer = await client.answer()
        assert (answer.status, answer.error["type"]) == (408, "invalid_request_error")
        await eventually(lambda: gateway.in_flight == 0)


class Slow(ScriptedEngine):
    """An engine on a bare socket that reads only as much of an upload as a test tells it."""

    def __init__(self) -> None:
        super().__init__(None, answers(200))
        self.got = 0
        self.digest = sha256()
        self.may_read = asyncio.Event()
        self.begun = asyncio.Event()
        self.status = b"200 OK"
        self.answers_early = False
        self.serving_now: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving_now.add(task)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.suppress(ConnectionError, asyncio.IncompleteReadError))
            stack.callback(writer.transport.abort)
            while True:
                asked = await reader.readuntil(b"\r\n\r\n")
                if asked.startswith(b"POST"):
                    await self._take(reader, writer)
                else:
                    self._say(writer, b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"t"}]}')

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun.set()
        if self.answers_early:
            self._say(writer, b'{"error":{"message":"no","type":"x","param":null,"code":null}}')
        await self.may_read.wait()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            piece = await reader.readexactly(size + 2)
            self.got += size
            self.digest.update(piece[:-2])
        await reader.readexactly(2)
        self._say(writer, b'{"text":"so"}')

    def _say(self, writer: asyncio.StreamWriter, said: bytes) -> None:
        line = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(line % (self.status if self.begun.is_set() else b"200 OK", len(said)) + said)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Slow]:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        server = await asyncio.start_server(self._serve, sock=listening, limit=2**16)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with server:
            yield self
            server.close()
            for task in self.serving_now:
                task.cancel()
            await asyncio.gather(*self.serving_now, return_exceptions=True)


async def test_a_large_upload_to_a_slow_engine_is_never_held() -> None:
    """Bytes between client and engine are in socket buffers. The gateway holds none of them."""
    total, at = 64 * MIB, 0
    sent = form(sound=bytes(total))
    async with Slow().serving() as engine, running(engine) as gateway:
        async with connected(gateway) as client:
            client.send(head(b"Content-Length: %d" % len(sent), b"Content-Type: " + TYPE, path=PATH.encode()))

            async def push() -> None:
                nonlocal at
                while at < len(sent):
                    client.send(sent[at : at + 2**16])
                    at += 2**16
                    await client.writer.drain()

            pushing = asyncio.create_task(push())
            async with asyncio.timeout(DEADLINE_S):
                await engine.begun.wait()
            before = -1
            while at != before:
                before = at
                await asyncio.sleep(0.5)
            assert at < total / 2, "the gateway read more than the engine"
            assert gateway.app[ADMISSION].body_bytes <= KEPT_BYTES
            engine.may_read.set()
            answer = await client.answer()
            await pushing
        assert (answer.status, answer.body) == (200, b'{"text":"so"}')
        assert engine.got > total
        assert gateway.app[ADMISSION].body_bytes == 0


async def test_an_engine_that_refuses_before_the_end_is_heard_and_sent_no_more() -> None:
    async with Slow().serving() as engine, running(engine) as gateway:
        engine.answers_early, engine.status = True, b"400 Bad Request"
        sent = form(sound=bytes(32 * MIB))
        async with connected(gateway) as client:
            client.send(head(b"Content-Length: %d" % len(sent), b"Content-Type: " + TYPE, path=PATH.encode()))
            client.send(sent[: 8 * MIB])
            answer = await client.answer()
        assert (answer.status, answer.error["message"]) == (400, "no")
        engine.may_read.set()


async def test_a_small_upload_goes_to_another_pod_and_a_large_one_fails_plainly() -> None:
    for first in (answers(503), drops):
        engines = [ScriptedEngine("a", first), ScriptedEngine("b", listens)]
        async with running(*engines) as gateway:
            for _ in range(2):
                answer = await send(gateway, form(Part("language", b"en")))
                assert (answer.status, answer.pod) == (200, "b")
                assert answer.json["digest"] == sha256(SOUND).hexdigest()
                assert answer.json["heard"] == {"model": "m", "language": "en"}
            large = [await send(gateway, form(sound=bytes(KEPT_BYTES + MIB))) for _ in range(2)]
            assert sorted(answer.status for answer in large) in ([200, 502], [200, 503], [200, 200])
            assert all(answer.json["error"]["message"] for answer in large if answer.status == 502)


async def test_a_client_that_leaves_ends_the_upload() -> None:
    async with Slow().serving() as engine, running(engine) as gateway:
        async with connected(gateway) as client:
            sent = form(sound=bytes(4 * MIB))
            client.send(head(b"Content-Length: %d" % len(sent), b"Content-Type: " + TYPE, path=PATH.encode()))
            client.send(sent[:MIB])
            async with asyncio.timeout(DEADLINE_S):
                await engine.begun.wait()
        await eventually(lambda: gateway.in_flight == 0)
        engine.may_read.set()


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    path = tmp_path / "tenants.yaml"
    entries = [
        {"name": name, "models": [name], "keys": [{"sha256": sha256(name.encode()).hexdigest()}]} for name in "ab"
    ]
    path.write_bytes(orjson.dumps({"tenants": entries}))
    return str(path)


async def test_a_tenant_cannot_slip_in_another_model_behind_the_file(tenants_file: str) -> None:
    """Each tenant may use one model, so its uploads begin before the field is read."""
    engines = [ScriptedEngine("a", listens, models=["a"]), ScriptedEngine("b", listens, models=["b"])]
    async with running(*engines, tenants_file=tenants_file) as gateway:
        for tenant, other in ("ab", "ba"):
            key = {"Authorization": f"Bearer {tenant}"}
            assert (await send(gateway, late(tenant), **key)).pod == tenant
            for sent in (late(other), form(model=other)):
                answer = await send(gateway, sent, **key)
                assert (answer.status, answer.json["error"]["code"]) == (403, "model_not_allowed")
    assert [len(engine.received) for engine in engines] == [1, 1]


class RefusesAtOnce(ScriptedEngine):
    """An engine that answers a form before all of it has arrived."""

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_post(PATH, answers(400))


async def test_the_answer_to_a_form_that_has_not_come_says_that_the_connection_ends() -> None:
    """Otherwise the client would send its next request on a connection that is about to end."""
    whole = form(sound=bytes(MIB // 2))
    async with running(RefusesAtOnce("a", answers(200)), max_body_bytes=MIB) as gateway, connected(gateway) as client:
        client.send(head(b"Content-Type: " + TYPE, b"Content-Length: %d" % len(whole), path=PATH.encode()))
        client.send(whole[: MIB // 4])
        answer = await client.answer()
        assert answer.status == 400
        assert b"connection: close" in answer.head.lower()
        client.send(whole[MIB // 4 :])
        assert await client.closed() == b""
