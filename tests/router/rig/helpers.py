"""Scripted engines on loopback, and a gateway in the test's own process; tests use real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from engine.contract import headers
from router.edge.errors import OPERATORS_PATHS
from router.settings.constants import Constants
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app
from router.startup.parts import ADMISSION, FLEET, SCRAPER
from router.startup.serving import build_admin_app, make_runner, operators_connections

Script = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Received:
    """A request as the engine got it."""

    path: str
    headers: Any
    body: bytes


class ScriptedEngine:
    """Answers `/v1/models` as `pod` and plays `script` for every generating request."""

    def __init__(self, pod: str | None, script: Script, *, epoch: int = 1, models: Iterable[str] = ("m",)) -> None:
        self.pod = pod
        self.script = script
        self.epoch = epoch
        self.models = list(models)
        self.received: list[Received] = []
        self.open = 0
        self.resets = 0
        self.reset_status = 200
        self.reset_body = b""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/reset_prefix_cache", self._reset)
        self._more_routes(app)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _more_routes(self, app: web.Application) -> None:
        """Add the routes that only this engine has."""

    async def _models(self, request: web.Request) -> web.Response:
        about = {} if self.pod is None else {headers.POD: self.pod, headers.EPOCH: str(self.epoch)}
        data = [{"id": model, "object": "model", "owned_by": "test"} for model in self.models]
        return web.json_response({"object": "list", "data": data}, headers=about)

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        return web.Response(status=self.reset_status, body=self.reset_body)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.received.append(Received(request.path, request.headers.copy(), await request.read()))
        self.open += 1
        try:
            return await self.script(request)
        finally:
            self.open -= 1


def event(text: str) -> bytes:
    """One SSE event of a completion."""
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "text": text}]}) + b"\n\n"


def usage_event(prompt: int, completion: int, cached: int | None) -> bytes:
    """Return the last event of a stream with include_usage; `cached` None: the engine leaves out cached tokens."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
    return b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"


def streams(chunks: Iterable[bytes], *, gap_s: float = 0.0, extra: dict[str, str] | None = None) -> Script:
    """A stream of these chunks."""

    async def play(request: web.Request) -> web.StreamResponse:
        response = await _begin(request, extra or {})
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(gap_s)
        return response

    return play


def dies_after(chunks: Iterable[bytes]) -> Script:
    """A stream whose connection is cut after these chunks."""

    async def play(request: web.Request) -> web.StreamResponse:
        response = await _begin(request, {})
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return response

    return play


def stalls_after(chunks: Iterable[bytes] = (), *, begin: bool = True) -> Script:
    """Return a script that sends nothing more after these chunks; with `begin=False` it does not even send a head."""

    async def play(request: web.Request) -> web.StreamResponse:
        if begin:
            response = await _begin(request, {})
            for chunk in chunks:
                await response.write(chunk)
        await asyncio.sleep(60)
        raise AssertionError("nobody cancelled a stalled request")

    return play


def answers(
    status: int, body: bytes = b"{}", content_type: str = "application/json", extra: dict[str, str] | None = None
) -> Script:
    """A whole answer; `extra` are headers."""

    async def play(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=content_type, headers=extra)

    return play


async def drops(request: web.Request) -> web.StreamResponse:
    """The connection is cut before any answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cuts_body(request: web.Request) -> web.StreamResponse:
    """A JSON answer that ends in the middle."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    await asyncio.sleep(0.02)
    assert request.transport is not None
    request.transport.abort()
    return response


async def _begin(request: web.Request, extra: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **extra})
    await response.prepare(request)
    return response


class Gateway:
    """A running gateway and a client session for it. `admin`: the runner of its operators' port."""

    def __init__(
        self,
        app: web.Application,
        runner: web.AppRunner,
        session: aiohttp.ClientSession,
        admin: web.AppRunner | None = None,
    ) -> None:
        self.app = app
        self.runner = runner
        self.url = _url_of(runner)
        self.session = session
        self._admin = admin

    @property
    def admin_url(self) -> str:
        assert self._admin is not None
        return _url_of(self._admin)

    def address(self, path: str) -> str:
        """Return the URL of `path`."""
        return (self.admin_url if path in OPERATORS_PATHS else self.url) + path

    @property
    def in_flight(self) -> int:
        """Sum of the requests and bytes in flight, as the gateway and each pod count them; 0 if every count is 0."""
        pods = [pod for member in self.app[FLEET].members() for pod in member.pods]
        decided = sum(pod.state.load(asyncio.get_running_loop().time()).in_flight for pod in pods)
        admission = self.app[ADMISSION]
        return (
            admission.in_flight
            + admission.body_bytes
            + admission.answer_bytes
            + sum(pod.in_flight for pod in pods)
            + decided
        )

    async def post(self, fields: object, *, path: str = "/v1/completions", **sent: str) -> Answer:
        """A request with a JSON body, read to its end."""
        body = fields if isinstance(fields, bytes) else orjson.dumps(fields)
        async with self.session.post(self.address(path), data=io.BytesIO(body), headers=sent) as response:
            received, is_whole = b"", False
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for chunk in response.content.iter_any():
                    received += chunk
                is_whole = True
            return Answer(response.status, response.headers.copy(), received, is_whole)

    async def get(self, path: str) -> Answer:
        """A GET, read to its end."""
        async with self.session.get(self.address(path)) as response:
            return Answer(response.status, response.headers.copy(), await response.read())

    async def ready_for_operators(self) -> Any:
        """What the operators' port says of readiness."""
        async with self.session.get(f"{self.admin_url}/ready") as response:
            return await response.json()

    async def wait_pods(self, count: int, model: str = "m") -> None:
        """Wait until `count` pods take requests for the model."""
        await eventually(lambda: len(self.app[FLEET].pods(model)) == count)


@dataclass(frozen=True)
class Answer:
    """A response read to its end."""

    status: int
    headers: Any
    body: bytes
    is_whole: bool = True
    """False if the connection ended before the end of the body."""

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def pod(self) -> str:
        return str(self.headers[headers.POD])


def _url_of(runner: web.AppRunner) -> str:
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


@contextlib.asynccontextmanager
async def serving_admin(app: web.Application) -> AsyncIterator[web.AppRunner]:
    """The operators' port of a started gateway."""
    connections = operators_connections(app)
    runner = make_runner(build_admin_app(app, connections), connections)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner
    finally:
        await runner.cleanup()


def app_of(**values: Any) -> web.Application:
    """The application of a gateway with these settings and constants, not started."""
    numbers = {name: values.pop(name) for name in Constants.__dataclass_fields__ if name in values}
    return build_app(GatewaySettings(**values), Constants(**numbers))


@contextlib.asynccontextmanager
async def running(*engines: ScriptedEngine, wait: int | None = None, **settings: Any) -> AsyncIterator[Gateway]:
    """Engines and a gateway in front of them, started and stopped; ready when every engine (or `wait`) is admitted."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            if not engine.url:
                await engine.start()
            stack.push_async_callback(engine.stop)
        values: dict[str, Any] = {"policy": "round_robin", "probe_interval_s": 0.1, "probe_timeout_s": 1.0, **settings}
        if not {"dns_name", "kube_selector", "kube_targets", "inference_pool"} & values.keys():
            values["engines"] = [engine.url for engine in engines]
        app = app_of(**values)
        runner = make_runner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        admin = await stack.enter_async_context(serving_admin(app))
        gateway = Gateway(app, runner, session, admin)
        await eventually(lambda: len(app[FLEET].admitted()) == (len(engines) if wait is None else wait))
        yield gateway
        await eventually(lambda: gateway.in_flight == 0)


def knows_ranks(gateway: Gateway) -> bool:
    """Whether the engines were asked for their ranks."""
    scraper = gateway.app[SCRAPER]
    return scraper is not None and scraper.knows_ranks


async def eventually(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait until `condition` holds; fail if it does not hold within `deadline_s` of the loop's time."""
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + deadline_s
    while not condition():
        assert now_s() < end_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)
