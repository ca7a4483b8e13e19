"""Assembles the gateway: the one place that names concrete classes, and sets the order of starting and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from engine.common.api_keys import parse_keys
from engine.common.files import FollowedFile
from engine.common.otel.running import metrics_sent
from engine.common.redis_client import connect as connect_redis
from router.choosing.peer_setup import PeerSync
from router.choosing.registry_view import NoRegistry
from router.edge.admission import MIB, Admission
from router.edge.background import running_task
from router.edge.client_keys import ClientKeys, counting_refusals, require_key
from router.edge.connection_limits import (
    LEAST_DROPPED_BYTES,
    ClientConnections,
    ConnectionLimits,
    most_connections,
    refuse_extra,
)
from router.edge.errors import counting_unknown_paths, end_connection, end_unread, errors
from router.edge.headers import UpstreamHeaders
from router.edge.tls import Certificate, engine_context
from router.engines.engine_client import EngineClient
from router.events.feed import EventFeed
from router.events.follow import Streams
from router.fleet.fetch import HttpFetch
from router.fleet.fleet import Fleet, FleetChange
from router.fleet.lack import Lacks
from router.fleet.pod import Pod
from router.fleet.probe import HttpProbe
from router.fleet.scrape import Scraper
from router.forwarding.tracing import SERVICE, run_tracer
from router.peer_sync.keyed_values import KeyedValues
from router.peer_sync.shares import TrafficShareValues
from router.reading.names import Names
from router.registry.index import PrefixIndex
from router.registry.reader import RegistryReader
from router.settings.constants import CONSTANTS as DEFAULTS
from router.settings.constants import Constants
from router.settings.gateway import GatewaySettings
from router.startup.event_sources import sources
from router.startup.handlers import handlers
from router.startup.parts import (
    ADMISSION,
    BODY_READER,
    CACHE_STORE,
    CHOOSER,
    CLIENT_KEYS,
    CONNECTIONS,
    CONSTANTS,
    DIED,
    DISCOVERY,
    ENGINES,
    EVENTS,
    EXPOSITION,
    FETCH,
    FLEET,
    INDEX,
    ISOLATION,
    LACKS,
    LIMITER,
    METRICS,
    NAMES,
    OBJECTIVES,
    PEER_SYNC,
    PLACES,
    READINESS,
    REGISTRY,
    SCRAPER,
    SESSION,
    SETTINGS,
    STREAMS,
    UPSTREAM,
    USAGE_LOG,
)
from router.startup.routes import add_routes
from router.startup.sources import make_discovery, make_objectives
from router.stored.cache_store import CacheBounds, MemoryCaches, RedisCaches
from router.stored.places import Places
from router.telemetry.metrics import Metrics
from router.tenants.isolation import Isolation, parse_secret
from router.tenants.limiter import Limiter
from router.tenants.redis_ledger import RedisLedger
from router.tenants.tenant import DEFAULT, Tenant
from router.tenants.tenant_file import parse_tenants
from router.tenants.usage_log import UsageLog

log = logging.getLogger(__name__)

PROBES_IDLE_S = 3.0
"""Idle connections of probes are closed before the engine closes them (uvicorn: 5 s), so no probe meets a closed
one."""
SWEEP_EVERY_S = 0.05
SWEEP_KEYS = 2_000
"""Keys of dropped pods that one step looks at. A step takes well under a millisecond."""


def build_app(settings: GatewaySettings, constants: Constants = DEFAULTS) -> web.Application:
    """Return the application, not started. The contexts make what needs a running loop, in this order."""
    metrics, client_keys = Metrics(), ClientKeys()
    guards = [require_key(client_keys, counting_refusals(metrics))] if settings.has_client_keys else []
    guards.append(counting_unknown_paths(partial(metrics.answers.unknown_path, "http")))
    app = web.Application(middlewares=[errors, refuse_extra, *guards], client_max_size=settings.max_body_bytes)
    app[SETTINGS], app[CONSTANTS] = settings, constants
    app[METRICS], app[CLIENT_KEYS] = metrics, client_keys
    app[ISOLATION] = Isolation()
    app[NAMES] = Names(settings.names, settings.default_model)
    has_engine_keys = bool(settings.engine_api_key_file or settings.engine_key_files)
    app[UPSTREAM] = UpstreamHeaders(passes_authorization=not (settings.has_client_keys or has_engine_keys))
    app[INDEX] = PrefixIndex()
    app[LACKS] = Lacks()
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    app[CONNECTIONS] = ClientConnections(
        ConnectionLimits(
            max_connections=most_connections(constants.max_connections, descriptors),
            descriptors=descriptors,
            head_s=constants.head_timeout_s,
            idle_s=settings.keepalive_timeout_s,
            write_s=settings.idle_timeout_s,
            dropped_bytes=max(settings.max_body_bytes, LEAST_DROPPED_BYTES),
        ),
        app[LACKS],
    )
    app[ADMISSION] = Admission(
        settings.max_in_flight, settings.max_in_flight_body_bytes, constants.max_in_flight_answer_mib * MIB
    )
    app.cleanup_ctx.append(run_tracer)
    app.cleanup_ctx.extend(
        (
            _supervision,
            _usage_log,
            _limiter,
            _cache_store,
            _keys,
            _clients,
            _fleet,
            _registry,
            _places,
            _events,
            handlers,
            _background,
        )
    )
    app.cleanup_ctx.append(_metrics_sent)
    app.on_response_prepare.extend((end_unread, _leave_when_draining))
    add_routes(app)
    return app


async def _leave_when_draining(request: web.Request, response: web.StreamResponse) -> None:
    """End kept connections with their next answer: ending them later would break the client's next request."""
    if request.app[ADMISSION].is_draining:
        end_connection(response)


# -- contexts: each makes one part, yields, and ends it; they end in reverse order ------------------------------------


async def _supervision(app: web.Application) -> AsyncIterator[None]:
    app[DIED] = asyncio.get_running_loop().create_future()
    yield


async def _usage_log(app: web.Application) -> AsyncIterator[None]:
    """Open the usage log. It is written to its end after the last request has ended."""
    app[USAGE_LOG] = None
    folder = app[SETTINGS].usage_log
    if folder is None:
        yield
        return
    app[USAGE_LOG] = usage_log = UsageLog(Path(folder))
    await usage_log.check()
    async with contextlib.AsyncExitStack() as running:
        running.push_async_callback(usage_log.close)
        await running.enter_async_context(kept(app, "the usage log", usage_log.run()))
        yield


async def _limiter(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    async with contextlib.AsyncExitStack() as running:
        shared: RedisLedger | None = None
        if settings.redis_url is not None and settings.tenants_file is not None:
            redis = await running.enter_async_context(connect_redis(settings.redis_url))
            shared = RedisLedger(redis, uuid.uuid4().hex)
        app[LIMITER] = limiter = Limiter(shared)
        running.push_async_callback(limiter.close)
        if settings.tenants_file is not None:
            await running.enter_async_context(kept(app, "the account of limits", limiter.run()))
        yield


async def _cache_store(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    bounds = CacheBounds(settings.named_caches, app[CONSTANTS].named_cache_mib * MIB)
    if settings.redis_url is None or not settings.named_caches:
        app[CACHE_STORE] = MemoryCaches(bounds, tenants=app[CLIENT_KEYS].count_tenants)
        yield
        return
    async with connect_redis(settings.redis_url) as redis:
        app[CACHE_STORE] = RedisCaches(redis, bounds, tenants=app[CLIENT_KEYS].count_tenants)
        yield


async def _keys(app: web.Application) -> AsyncIterator[None]:
    """Read the tenants and the keys of clients and engines before anything is served, then follow their files."""
    settings, keys, metrics = app[SETTINGS], app[CLIENT_KEYS], app[METRICS]

    def use_tenants(tenants: Sequence[Tenant]) -> None:
        names = [tenant.name for tenant in tenants]
        app[LIMITER].use(tenants)
        app[ISOLATION].keep(names)
        metrics.tenants.keep([*names, DEFAULT.name])
        keys.use_tenants(tenants)

    parse = partial(parse_tenants, has_secret=settings.tenant_secret_file is not None)
    wanted: Sequence[tuple[str, str | None, Callable[[Path, bytes], Any], Callable[[Any], None]]] = (
        ("API keys", settings.api_keys_file, parse_keys, keys.use),
        ("the engines' API key", settings.engine_api_key_file, parse_keys, app[UPSTREAM].use_key),
        *(
            (f"the API key of engines, {path},", path, parse_keys, partial(app[UPSTREAM].use_key, name=path))
            for path in settings.engine_key_files
        ),
        ("the secret of tenants' salts", settings.tenant_secret_file, parse_secret, app[ISOLATION].use),
        ("tenants", settings.tenants_file, parse, use_tenants),
    )
    async with contextlib.AsyncExitStack() as running:
        for what, path, parser, use in wanted:
            if path is not None:
                file = FollowedFile(what, Path(path), parser, use)
                await file.load()
                await running.enter_async_context(kept(app, f"reading {what}", file.follow()))
        yield


async def _clients(app: web.Application) -> AsyncIterator[None]:
    """Open the client for engines. The requests in flight bound its connections; nothing queues for a connection."""
    settings = app[SETTINGS]
    context: ssl.SSLContext | None = None
    certificate: Certificate | None = None
    has_tls_sets = any(target.tls for target in settings.targets)
    if settings.has_engine_tls or has_tls_sets or any(url.startswith("https:") for url in settings.engines):
        context = engine_context(settings.engine_tls_ca_file, settings.engine_tls_server_name)
        if settings.engine_tls_cert_file and settings.engine_tls_key_file:
            certificate = Certificate(context, settings.engine_tls_cert_file, settings.engine_tls_key_file)
    connect_s = app[CONSTANTS].connect_timeout_s
    app[ENGINES] = engines = EngineClient(context, connect_s)
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context or True, limit=0, keepalive_timeout=PROBES_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
        ) as app[SESSION],
        kept(app, "keeping connections to engines", engines.keep()),
        contextlib.AsyncExitStack() as running,
    ):
        if certificate is not None:
            await running.enter_async_context(kept(app, "reading the certificate for engines", certificate.follow()))
        yield
    await engines.close()


async def _fleet(app: web.Application) -> AsyncIterator[None]:
    settings, constants = app[SETTINGS], app[CONSTANTS]
    app[DISCOVERY] = make_discovery(settings, constants)
    app[OBJECTIVES] = make_objectives(settings)

    def credentials(url: str) -> Mapping[str, str]:
        return app[UPSTREAM].credentials_of(app[FLEET].key_of(url))

    app[FLEET] = Fleet(
        app[DISCOVERY],
        HttpProbe(
            app[SESSION],
            constants.probe_timeout_s,
            credentials,
            app[LACKS],
            pods=lambda: app[FLEET].size,
        ),
        interval_s=constants.probe_interval_s,
        eject_after=constants.eject_after,
        expected=[*settings.models, *app[NAMES].models],
    )
    app[FETCH] = HttpFetch(app[SESSION], credentials, app[LACKS])
    app[SCRAPER] = None
    if settings.engine_metrics_port != 0:
        app[SCRAPER] = Scraper(app[FETCH], app[FLEET], port=settings.engine_metrics_port)

    def give_up(pod: Pod) -> None:
        """If another pod is left, send it the requests that a sleeping pod has not begun to answer."""
        if any(app[FLEET].pods(model.name) for model in pod.identity.models):
            for target in pod.targets.values():
                app[ENGINES].give_up(target)

    app[FLEET].listen_for_sleep(give_up)
    yield


async def _registry(app: web.Application) -> AsyncIterator[None]:
    settings, fleet = app[SETTINGS], app[FLEET]
    app[REGISTRY] = NoRegistry()
    if settings.redis_url is not None:
        app[REGISTRY] = reader = RegistryReader(
            settings.redis_url,
            app[INDEX],
            fleet.report,
            stride=app[CONSTANTS].stride_bytes,
            lease_s=app[CONSTANTS].lease_s,
            on_life=fleet.heard,
        )
        fleet.listen(lambda change: reader.set_pods(change.pods))
    yield


async def _places(app: web.Application) -> AsyncIterator[None]:
    """Follow where engines keep conversations, shared with the other gateways if there is a Redis."""
    url = app[SETTINGS].redis_url
    async with contextlib.AsyncExitStack() as running:
        redis = None if url is None else await running.enter_async_context(connect_redis(url))
        app[PLACES] = places = Places(asyncio.get_running_loop().time, redis)
        if redis is not None:
            await running.enter_async_context(kept(app, "telling where conversations are", places.run()))
        yield


async def _events(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    app[EVENTS] = events = EventFeed(
        app[INDEX],
        stride=app[CONSTANTS].stride_bytes,
        belief_ttl_s=app[CONSTANTS].foreign_ttl_s,
        clock=asyncio.get_running_loop().time,
    )
    app[STREAMS] = Streams(events, bind=settings.kv_events_bind)
    yield


async def _metrics_sent(app: web.Application) -> AsyncIterator[None]:
    """Send the metrics over OTLP, if the environment asks for that."""
    async with metrics_sent(SERVICE, app[EXPOSITION].families):
        yield


async def _background(app: web.Application) -> AsyncIterator[None]:
    """Run the background work: forget what is gone, and find out when the gateway is warm."""
    index, metrics, registry, peer_sync, streams = app[INDEX], app[METRICS], app[REGISTRY], app[PEER_SYNC], app[STREAMS]

    def forget(change: FleetChange) -> None:
        metrics.answers.keep_pods(change.pods)
        for pod in change.ended:
            streams.leave(pod)
            if not registry.reports(pod):  # the registry reader handles pods that publish
                index.drop(pod)
                app[CHOOSER].tell_forgotten(pod, is_sure=False)
        if isinstance(peer_sync, PeerSync):
            peer_sync.fleet_changed(change)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            index.sweep(SWEEP_KEYS)

    async def warm_up() -> None:
        await app[FLEET].wait_probed()
        loop, timeout_s = asyncio.get_running_loop(), app[CONSTANTS].warm_timeout_s
        until_s = loop.time() + timeout_s
        if isinstance(registry, RegistryReader) and not await registry.wait_warm(timeout_s):
            log.warning("registry: not loaded within %g s; going on without it", timeout_s)
        if isinstance(peer_sync, PeerSync) and not await peer_sync.reader.wait_warm(max(0.0, until_s - loop.time())):
            log.warning("gateways: what others know is not loaded within %g s; going on without it", timeout_s)
        app[READINESS].is_warm = True

    app[FLEET].listen(forget)
    app[FLEET].listen(lambda change: streams.set_sources(sources(app[FLEET].members(), app[SETTINGS])))
    async with contextlib.AsyncExitStack() as running:
        if isinstance(registry, RegistryReader):
            await running.enter_async_context(kept(app, "the registry", registry.run()))
            shares = KeyedValues(
                app[SETTINGS].redis_url or "", TrafficShareValues(app[CHOOSER].name, app[CHOOSER].shares)
            )
            running.push_async_callback(shares.close)
            await running.enter_async_context(kept(app, "the exchange of shares", shares.run()))
        if isinstance(peer_sync, PeerSync):
            running.push_async_callback(peer_sync.close)
            for name, work in await peer_sync.start():
                await running.enter_async_context(kept(app, name, work))
        await running.enter_async_context(kept(app, "reading heavy bodies", app[BODY_READER].serve()))
        await running.enter_async_context(kept(app, "following KV events", streams.run()))
        await running.enter_async_context(kept(app, "discovery", app[FLEET].run()))
        if (objectives := app[OBJECTIVES]) is not None:
            await running.enter_async_context(kept(app, "following InferenceObjectives", objectives.run()))
        if (scraper := app[SCRAPER]) is not None:
            await running.enter_async_context(kept(app, "reading the engines' metrics", scraper.run()))
        await running.enter_async_context(kept(app, "the sweep of the index", sweep()))
        await running.enter_async_context(kept(app, "the watch over connections", app[CONNECTIONS].watch()))
        await running.enter_async_context(kept(app, "warming up", warm_up()))
        yield


@contextlib.asynccontextmanager
async def kept(app: web.Application, name: str, work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run `work` as a task while the block lasts. If it fails, the gateway ends: `serve` waits for the first
    failure."""

    def look(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s failed: the gateway stops", name, exc_info=error)
            app[ADMISSION].is_draining = True  # the gateway takes no more requests
            if not app[DIED].done():
                app[DIED].set_result(f"{name} failed: {type(error).__name__}: {error}")

    async with running_task(work) as task:
        task.add_done_callback(look)
        yield
