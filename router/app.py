"""The gateway put together: the one place that names concrete classes, and the order of starting and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from engine.contract.requests import Endpoint
from router.config import GatewaySettings
from router.fleet.discovery import Discovery, StaticDiscovery
from router.fleet.dns import DnsDiscovery, SystemResolver
from router.fleet.fleet import Fleet, FleetChange
from router.fleet.kubernetes import KubernetesDiscovery
from router.fleet.kubernetes_login import connect, login
from router.fleet.probe import HttpProbe
from router.gateway.admin import Admin
from router.gateway.admission import Admission
from router.gateway.chooser import Chooser
from router.gateway.errors import errors, http_log
from router.gateway.estimates import Estimates
from router.gateway.generate import Generate
from router.gateway.headers import UpstreamHeaders
from router.gateway.inbound import Reader
from router.gateway.keys import ClientKeys, KeyFile, require_key
from router.gateway.proxy import Limits, Proxy
from router.gateway.registry import NoRegistry
from router.gateway.shadow import Shadows
from router.gateway.status import Status
from router.registry.index import PrefixIndex
from router.registry.reader import RegistryReader
from router.registry.share_sync import ShareSync
from router.routing.policies import POLICY_NAMES, PolicyOptions, make_policy
from router.routing.types import Policy
from router.telemetry.log import RequestLog
from router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")

POOLED_IDLE_S = 3.0
"""Idle connections to engines are given up before the engine does so (uvicorn: 5 s), lest a request meets the end."""
SWEEP_EVERY_S = 0.05
SWEEP_KEYS = 2_000
"""Keys of dropped pods looked at in one go: well under a millisecond."""
FORCED_STOP_S = 0.5
"""For what is still going on when the drain is over; then its connection is cut."""


class CannotListen(Exception):
    """The port cannot be had; the text says which and why."""


SETTINGS = web.AppKey("settings", GatewaySettings)
METRICS = web.AppKey("metrics", Metrics)
INDEX = web.AppKey("index", PrefixIndex)
ADMISSION = web.AppKey("admission", Admission)
SESSION = web.AppKey("session", aiohttp.ClientSession)
DISCOVERY: web.AppKey[Discovery] = web.AppKey("discovery")
FLEET = web.AppKey("fleet", Fleet)
REGISTRY: web.AppKey[RegistryReader | NoRegistry] = web.AppKey("registry")
STATUS = web.AppKey("status", Status)
CHOOSER = web.AppKey("chooser", Chooser)
GENERATE = web.AppKey("generate", Generate)
ADMIN = web.AppKey("admin", Admin)
UPSTREAM = web.AppKey("upstream", UpstreamHeaders)
CLIENT_KEYS = web.AppKey("client_keys", ClientKeys)


def build_app(settings: GatewaySettings) -> web.Application:
    """The application, not started. What needs a running loop is made by the contexts, in this order."""
    metrics, client_keys = Metrics(), ClientKeys()
    guards = [require_key(client_keys, metrics.unauthorized)] if settings.api_keys_file else []
    app = web.Application(middlewares=[errors, *guards], client_max_size=settings.max_body_bytes)
    app[SETTINGS] = settings
    app[METRICS], app[CLIENT_KEYS] = metrics, client_keys
    app[UPSTREAM] = UpstreamHeaders(passes_authorization=not (settings.api_keys_file or settings.engine_api_key_file))
    app[INDEX] = PrefixIndex()
    app[ADMISSION] = Admission(settings.max_in_flight, settings.max_in_flight_body_bytes)
    app.cleanup_ctx.extend((_keys, _session, _fleet, _registry, _handlers, _background))
    app.on_response_prepare.append(_leave_when_draining)
    for endpoint in Endpoint:
        app.router.add_post(endpoint, _to(GENERATE, Generate.handle))
    app.router.add_get("/v1/models", _to(STATUS, Status.models))
    app.router.add_get("/v1/models/{model:.+}", _to(STATUS, Status.model))
    app.router.add_get("/v1/pods", _to(STATUS, Status.pods))
    app.router.add_get("/health", _to(STATUS, Status.health))
    app.router.add_get("/ready", _to(STATUS, Status.ready))
    if settings.metrics_port is None:
        app.router.add_get("/metrics", _to(STATUS, Status.metrics))
    app.router.add_post("/v1/route/explain", _to(ADMIN, Admin.explain))
    app.router.add_post("/reset_prefix_cache", _to(ADMIN, Admin.reset_prefix_cache))
    return app


async def _leave_when_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Let kept connections end with their next answer: one left idle would meet a client's next request."""
    if request.app[ADMISSION].is_draining:
        response.force_close()
        response.headers["Connection"] = "close"


def build_metrics_app(app: web.Application) -> web.Application:
    """`/metrics` of the started `app` alone, for a port that no Ingress leads to."""
    status = app[STATUS]
    metrics_app = web.Application(middlewares=[errors])
    metrics_app.router.add_get("/metrics", status.metrics)
    return metrics_app


def _to(
    key: web.AppKey[T], method: Callable[[T, web.Request], Awaitable[web.StreamResponse]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that calls a method of an object of the application, which exists once the application has started."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await method(request.app[key], request)

    return handle


def make_discovery(settings: GatewaySettings) -> Discovery:
    """The source of engines that the settings name."""
    match settings.discovery:
        case "kubernetes":
            assert settings.kube_selector is not None
            credentials = partial(login, settings.kube_config, settings.kube_namespace, environ=os.environ)
            port = settings.kube_port
            return KubernetesDiscovery(
                partial(connect, credentials, settings.kube_selector), port=int(port) if port.isdecimal() else port
            )
        case "dns":
            assert settings.dns_name is not None
            return DnsDiscovery(
                SystemResolver(), settings.dns_name, settings.dns_port, max_ttl_s=settings.dns_max_ttl_s
            )
        case "static":
            return StaticDiscovery(settings.engines)


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, then let started answers finish; a second signal ends them.

    Raises CannotListen and KeyFileError where it cannot start.
    """
    stop, force = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: force.set() if stop.is_set() else stop.set())
    app = build_app(settings)
    async with contextlib.AsyncExitStack() as running:
        site, url = await _listen(running, make_runner(app), settings.host, settings.port)
        lines = [f"listening on {url}"]
        if settings.metrics_port is not None:
            runner = web.AppRunner(
                build_metrics_app(app), access_log=None, logger=http_log(), shutdown_timeout=FORCED_STOP_S
            )
            _, url = await _listen(running, runner, settings.host, settings.metrics_port)
            lines.append(f"metrics on {url}/metrics")
        print("\n".join(lines), flush=True)
        await stop.wait()
        await _drain(app, site, force)


async def _listen(
    running: contextlib.AsyncExitStack, runner: web.AppRunner, host: str, port: int
) -> tuple[web.TCPSite, str]:
    """Start the runner's application and its site, until `running` ends; the site's URL. Raises CannotListen."""
    running.push_async_callback(runner.cleanup)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    bound, number = runner.addresses[0][:2]
    return site, f"http://{f'[{bound}]' if ':' in bound else bound}:{number}"


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner whose handlers are cancelled when their client leaves, so that the engine hears of it at once."""
    return web.AppRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,
        access_log=None,
        logger=http_log(),
        shutdown_timeout=FORCED_STOP_S,
    )


async def _drain(app: web.Application, site: web.TCPSite, force: asyncio.Event) -> None:
    settings, admission = app[SETTINGS], app[ADMISSION]
    admission.is_draining = True
    log.info("stopping: %d requests in flight; a second signal ends them", admission.in_flight)

    async def finish() -> None:
        await asyncio.sleep(settings.drain_delay_s)
        await site.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s):
                await admission.wait_idle()

    async with _running(finish()) as finishing, _running(force.wait()) as forced:
        await asyncio.wait((finishing, forced), return_when=asyncio.FIRST_COMPLETED)
    if admission.in_flight:
        log.warning("stopping with %d requests in flight", admission.in_flight)


# -- contexts: each makes one thing, yields, and ends it; ended in reverse order -------------------------------------


async def _keys(app: web.Application) -> AsyncIterator[None]:
    """The keys of clients and of the engines, read before anything is served, and followed."""
    settings = app[SETTINGS]
    wanted = ((settings.api_keys_file, app[CLIENT_KEYS].use), (settings.engine_api_key_file, app[UPSTREAM].use_key))
    async with contextlib.AsyncExitStack() as running:
        for path, use in wanted:
            if path is not None:
                file = KeyFile(Path(path), use)
                await file.load()
                await running.enter_async_context(_running(file.follow()))
        yield


async def _session(app: web.Application) -> AsyncIterator[None]:
    """Connections to the engines. Their number is bounded by the requests in flight; nothing queues for one."""
    settings = app[SETTINGS]
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=POOLED_IDLE_S)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        auto_decompress=False,
    ) as app[SESSION]:
        yield


async def _fleet(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    app[DISCOVERY] = make_discovery(settings)
    app[FLEET] = Fleet(
        app[DISCOVERY],
        HttpProbe(app[SESSION], settings.probe_timeout_s, lambda: app[UPSTREAM].credentials),
        interval_s=settings.probe_interval_s,
        eject_after=settings.eject_after,
        expected=settings.models,
    )
    yield


async def _registry(app: web.Application) -> AsyncIterator[None]:
    settings, fleet = app[SETTINGS], app[FLEET]
    app[REGISTRY] = NoRegistry()
    if settings.redis_url is not None:
        app[REGISTRY] = reader = RegistryReader(
            settings.redis_url, app[INDEX], fleet.report, stride=settings.stride, lease_s=settings.lease_s
        )
        fleet.listen(lambda change: reader.set_pods(change.pods))
    yield


async def _handlers(app: web.Application) -> AsyncIterator[None]:
    settings, fleet, metrics, index, registry = app[SETTINGS], app[FLEET], app[METRICS], app[INDEX], app[REGISTRY]
    estimates = Estimates()
    options = PolicyOptions(hash_depth_strides=settings.hash_depth_strides, load_bound=settings.load_bound)
    reader = Reader(
        fleet,
        estimates,
        stride=settings.stride,
        default_policy=settings.policy,
        policies=frozenset(POLICY_NAMES) if settings.allow_policy_header else None,
    )

    def make_policies() -> dict[str, Policy]:
        return {name: make_policy(name, options) for name in POLICY_NAMES}

    app[CHOOSER] = chooser = Chooser(
        fleet,
        index,
        registry,
        make_policies,
        estimates,
        metrics,
        clock=asyncio.get_running_loop().time,
        stride=settings.stride,
        speculation_ttl_s=settings.speculation_ttl_s,
        foreign_ttl_s=settings.foreign_ttl_s,
        shadows=Shadows(settings.shadow_policies, make_policies, metrics) if settings.shadow_policies else None,
    )
    limits = Limits(
        first_byte_s=settings.first_byte_timeout_s, idle_s=settings.idle_timeout_s, retries=settings.retries
    )
    proxy = Proxy(app[SESSION], app[UPSTREAM], fleet, chooser, metrics, limits)
    app[GENERATE] = Generate(
        app[ADMISSION], reader, chooser, proxy, metrics, RequestLog(), total_timeout_s=settings.total_timeout_s
    )
    app[STATUS] = Status(app[DISCOVERY], fleet, registry, app[ADMISSION], metrics)
    app[ADMIN] = Admin(
        app[SESSION],
        app[UPSTREAM],
        fleet,
        app[ADMISSION],
        reader,
        chooser,
        index,
        is_enabled=settings.enable_admin,
    )
    yield


async def _background(app: web.Application) -> AsyncIterator[None]:
    """What goes on beside the requests: forgetting what is gone, and finding out when the gateway is warm."""
    index, metrics, registry = app[INDEX], app[METRICS], app[REGISTRY]

    def forget(change: FleetChange) -> None:
        metrics.keep_pods(change.pods)
        for pod in change.ended:
            if not registry.reports(pod):  # the registry reader sees the end of a publishing pod's life by itself
                index.drop(pod)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            index.sweep(SWEEP_KEYS)

    async def warm_up() -> None:
        await app[FLEET].wait_probed()
        if isinstance(registry, RegistryReader) and not await registry.wait_warm(app[SETTINGS].warm_timeout_s):
            log.warning("registry: not loaded within %g s; going on without it", app[SETTINGS].warm_timeout_s)
        app[STATUS].is_warm = True

    app[FLEET].listen(forget)
    async with contextlib.AsyncExitStack() as running:
        if isinstance(registry, RegistryReader):
            await running.enter_async_context(_running(registry.run()))
            shares = ShareSync(app[SETTINGS].redis_url or "", uuid.uuid4().hex, app[CHOOSER].traffic_shares)
            await running.enter_async_context(_running(shares.run()))
        await running.enter_async_context(_running(app[FLEET].run()))
        await running.enter_async_context(_running(sweep()))
        await running.enter_async_context(_running(warm_up()))
        yield


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """`work` as a task while the block lasts. It should not fail; if it does, the log says so at once."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_crash)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


def _log_crash(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task died", exc_info=task.exception())
