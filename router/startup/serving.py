"""Serves the gateway: its ports, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from aiohttp import web

from engine.common.collector import quiet_collector
from router.edge.background import running_task
from router.edge.body import no_go_ahead
from router.edge.connection_limits import ClientConnections, LimitedRunner, want_descriptors
from router.edge.errors import end_unread, errors, http_log
from router.edge.tls import Certificate, client_context
from router.operators.audit import audited
from router.operators.guard import guarded
from router.operators.live_feed import Live
from router.operators.pages import Pages
from router.operators.snapshot import Snapshots
from router.picker.parts import NoPort
from router.settings.constants import CONSTANTS as DEFAULTS
from router.settings.constants import Constants
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app, kept
from router.startup.parts import (
    ADMISSION,
    CHOOSER,
    CONNECTIONS,
    CONSTANTS,
    DIED,
    EXPLAIN,
    EXPOSITION,
    FLEET,
    INDEX,
    LACKS,
    METRICS,
    PICKER,
    POD_LIST,
    READINESS,
    RECORDER,
    RESETS,
    ROOM,
    SETTINGS,
)

log = logging.getLogger(__name__)

OPERATORS = 32
"""Most connections to the metrics port, and to the administration port."""
FORCED_STOP_S = 0.5
"""Seconds for requests that still run when the drain is over; then their connections are cut."""


class TaskDied(Exception):
    """A background task has ended with an error; the text says which. What it kept current is out of date."""


class CannotListen(Exception):
    """The port is not available; the text says which and why."""


def build_metrics_app(app: web.Application, connections: ClientConnections) -> web.Application:
    """Return an application with only `/metrics` of the started `app`, for a port without an Ingress."""
    metrics_app = web.Application(middlewares=[errors])
    metrics_app.on_response_prepare.append(end_unread)
    metrics_app.cleanup_ctx.append(partial(_watched, app, "the watch over scrapers", connections))
    metrics_app.router.add_get("/metrics", app[EXPOSITION].page)
    return metrics_app


def build_admin_app(app: web.Application, connections: ClientConnections) -> web.Application:
    """Return the operators' application of the started `app`, for a port that no client reaches."""
    readiness, live = app[READINESS], make_live(app)
    pages = Pages(live)
    host, _ = app[SETTINGS].admin_address or ("", 0)
    guards = [audited, errors, guarded(host)]
    admin_app = web.Application(middlewares=guards, client_max_size=app[SETTINGS].max_body_bytes)
    admin_app.on_response_prepare.append(end_unread)
    admin_app.cleanup_ctx.append(partial(_watched, app, "the watch over operators", connections))
    admin_app.cleanup_ctx.append(partial(_shown, app, live))
    for path, handler in (
        ("/health", readiness.health),
        ("/ready", readiness.ready_for_operators),
        ("/metrics", app[EXPOSITION].page),
        ("/v1/pods", app[POD_LIST].pods),
        ("/ui", pages.page),
        ("/ui/events", pages.events),
        ("/ui/state", pages.state),
    ):
        admin_app.router.add_get(path, handler)
    admin_app.router.add_post("/v1/route/explain", app[EXPLAIN].explain, expect_handler=no_go_ahead)
    admin_app.router.add_post("/reset_prefix_cache", app[RESETS].reset_prefix_cache)
    return admin_app


async def _watched(
    app: web.Application, name: str, connections: ClientConnections, _: web.Application
) -> AsyncIterator[None]:
    async with kept(app, name, connections.watch()):
        yield


def make_live(app: web.Application) -> Live:
    """Return the live view of the started `app` for operators."""
    settings = app[SETTINGS]

    def observe(live: Live | None) -> None:
        app[CHOOSER].observer = app[RECORDER].observer = live

    return Live(
        Snapshots(app[FLEET], app[INDEX], app[ROOM]),
        app[METRICS],
        app[ADMISSION],
        about={"name": socket.gethostname(), "policy": settings.policy},
        observe=observe,
    )


async def _shown(app: web.Application, live: Live, _: web.Application) -> AsyncIterator[None]:
    async with kept(app, "the live page", live.run()):
        yield


@contextlib.asynccontextmanager
async def run_picker(app: web.Application) -> AsyncIterator[int]:
    """Serve the endpoint picker of the started `app` while the block lasts. Yields its port. Raises NoPort."""
    from router.picker.server import Listen, serving  # takes 10 MB of memory

    settings, constants = app[SETTINGS], app[CONSTANTS]
    assert settings.ext_proc_port is not None
    cert_file, key_file = settings.tls_cert_file, settings.tls_key_file
    if settings.ext_proc_cert_path is not None:
        cert_file, key_file = (f"{settings.ext_proc_cert_path}/{name}" for name in ("tls.crt", "tls.key"))
    listen = Listen(
        settings.host,
        settings.ext_proc_port,
        constants.max_connections,
        cert_file,
        key_file,
    )
    async with serving(app[PICKER], app[READINESS].missing, listen) as port:
        yield port


def operators_connections(app: web.Application) -> ClientConnections:
    """Return limits apart from those of `app`'s clients, who may have opened as many connections as they may."""
    return ClientConnections(replace(app[CONNECTIONS].limits, max_connections=OPERATORS), app[LACKS])


async def serve(settings: GatewaySettings, constants: Constants = DEFAULTS) -> None:
    """Serve until SIGTERM or SIGINT, then let started answers finish; a second signal ends them.

    Raises CannotListen and UnusableFile if it cannot start. Raises TaskDied after the same drain, but without
    `drain_delay_s`.
    """
    for words in settings.without_effect():
        log.warning("%s", words)
    stop, force = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: force.set() if stop.is_set() else stop.set())
    want_descriptors(constants.max_connections)
    app = build_app(settings, constants)
    async with contextlib.AsyncExitStack() as running:
        certificate: Certificate | None = None
        if settings.tls_cert_file and settings.tls_key_file:
            certificate = Certificate(client_context(), settings.tls_cert_file, settings.tls_key_file)
        context = certificate.context if certificate else None
        site, url = await _listen(running, make_runner(app, tls=context), settings.host, settings.port)
        if certificate is not None:
            await running.enter_async_context(kept(app, "reading the certificate", certificate.follow()))
        lines = [f"listening on {url}"]
        if settings.metrics_port is not None:
            connections = operators_connections(app)
            runner = make_runner(build_metrics_app(app, connections), connections)
            _, url = await _listen(running, runner, settings.host, settings.metrics_port)
            lines.append(f"metrics on {url}/metrics")
        if settings.admin_address is not None:
            connections = operators_connections(app)
            runner = make_runner(build_admin_app(app, connections), connections)
            _, url = await _listen(running, runner, *settings.admin_address)
            lines.append(f"administration on {url}")
        if settings.ext_proc_port is not None:
            try:
                picker_port = await running.enter_async_context(run_picker(app))
            except NoPort as error:
                raise CannotListen(str(error)) from None
            lines.append(f"endpoint picker on {settings.host}:{picker_port}")
        await running.enter_async_context(quiet_collector(lambda: not app[ADMISSION].in_flight))
        print("\n".join(lines), flush=True)
        async with running_task(stop.wait()) as told:
            await asyncio.wait((told, app[DIED]), return_when=asyncio.FIRST_COMPLETED)
        await _drain(app, site, force, 0.0 if app[DIED].done() else settings.drain_delay_s)
        if app[DIED].done():
            raise TaskDied(app[DIED].result())


async def _listen(
    running: contextlib.AsyncExitStack, runner: LimitedRunner, host: str, port: int
) -> tuple[web.TCPSite, str]:
    """Start the runner's application and its site, until `running` ends. Return the site and its URL. Raises
    CannotListen."""
    running.push_async_callback(runner.cleanup)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    bound, number = runner.addresses[0][:2]
    scheme = "http" if runner.tls is None else "https"
    return site, f"{scheme}://{f'[{bound}]' if ':' in bound else bound}:{number}"


def make_runner(
    app: web.Application, connections: ClientConnections | None = None, tls: ssl.SSLContext | None = None
) -> LimitedRunner:
    """Return a runner that cancels a handler when its client leaves, so that the engine learns of it at once."""
    return LimitedRunner(
        app, connections or app[CONNECTIONS], shutdown_timeout=FORCED_STOP_S, logger=http_log(), tls=tls
    )


async def _drain(app: web.Application, site: web.TCPSite, force: asyncio.Event, delay_s: float) -> None:
    settings, admission = app[SETTINGS], app[ADMISSION]
    admission.is_draining = True
    log.info("stopping: %d requests in flight; a second signal ends them", admission.in_flight)

    async def finish() -> None:
        await asyncio.sleep(delay_s)
        await site.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s):
                await admission.wait_idle()

    async with running_task(finish()) as finishing, running_task(force.wait()) as forced:
        await asyncio.wait((finishing, forced), return_when=asyncio.FIRST_COMPLETED)
    app[ROOM].refuse_all()
    if admission.in_flight:
        log.warning("stopping with %d requests in flight", admission.in_flight)
