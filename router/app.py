"""The gateway put together: the one place that names concrete classes, and the order of starting and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
from aiohttp import web

from engine.contract.api_keys import parse_keys
from engine.contract.files import FollowedFile
from engine.contract.redis_client import connect as connect_redis
from engine.contract.requests import Endpoint
from router.config import GatewaySettings
from router.events.feed import EventFeed
from router.events.follow import Streams
from router.fleet.discovery import Discovery, OverTls
from router.fleet.fetch import HttpFetch
from router.fleet.fleet import Fleet, FleetChange
from router.fleet.lack import Lacks
from router.fleet.pod import Pod
from router.fleet.probe import HttpProbe
from router.fleet.scrape import Scraper
from router.gateway.accounts import Accounts
from router.gateway.admin import Admin
from router.gateway.admission import MIB, Admission
from router.gateway.body import BodyLimits, no_go_ahead
from router.gateway.chooser import Chooser
from router.gateway.door import LEAST_DROPPED_BYTES, Door, DoorLimits, most_connections, refuse_extra
from router.gateway.engine_client import EngineClient
from router.gateway.errors import Unauthorized, errors
from router.gateway.estimates import Estimates
from router.gateway.event_sources import sources
from router.gateway.generate import Generate
from router.gateway.headers import UpstreamHeaders
from router.gateway.inbound import Reader
from router.gateway.keys import ClientKeys, ExpiredKey, require_key
from router.gateway.learning import Learning
from router.gateway.limits import Limits
from router.gateway.proxy import Proxy
from router.gateway.registry import NoRegistry, WithEvents
from router.gateway.sessions import Sessions
from router.gateway.shadow import Shadows
from router.gateway.sharing import NoSharing, Sharing, make_sharing, new_notebook
from router.gateway.status import Status
from router.gateway.tasks import running_task
from router.gateway.telling import Telling
from router.gateway.tls import Certificate, engine_context
from router.gateway.waiting import RoomLimits, WaitingRoom
from router.overload.line import LineLimits
from router.registry.index import PrefixIndex
from router.registry.reader import RegistryReader
from router.registry.share_sync import ShareSync
from router.routing.policies import POLICY_NAMES, PolicyOptions, make_policy
from router.routing.types import Policy
from router.sources import make_discovery
from router.telemetry.log import RequestLog
from router.telemetry.metrics import Metrics
from router.tenants.isolation import Isolation, parse_secret
from router.tenants.limiter import Limiter
from router.tenants.redis_ledger import RedisLedger
from router.tenants.tenant import DEFAULT, Tenant
from router.tenants.tenant_file import parse_tenants
from router.tenants.usage_log import UsageLog

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBES_IDLE_S = 3.0
"""Idle connections of probes are given up before the engine does so (uvicorn: 5 s), lest a probe meets the end."""
SWEEP_EVERY_S = 0.05
SWEEP_KEYS = 2_000
"""Keys of dropped pods looked at in one go: well under a millisecond."""
ENGINE_PRIORITY_SIGNS: Mapping[str, Literal[-1, 1] | None] = {"none": None, "vllm": -1, "sglang": 1}
"""Of the body's field `priority`: vLLM takes the lowest first, SGLang the highest (unless it is told
--schedule-low-priority-values-first)."""
SETTINGS = web.AppKey("settings", GatewaySettings)
METRICS = web.AppKey("metrics", Metrics)
INDEX = web.AppKey("index", PrefixIndex)
ADMISSION = web.AppKey("admission", Admission)
SESSION = web.AppKey("session", aiohttp.ClientSession)
"""For probes and administration."""
ENGINES = web.AppKey("engines", EngineClient)
DISCOVERY: web.AppKey[Discovery] = web.AppKey("discovery")
FLEET = web.AppKey("fleet", Fleet)
SCRAPER: web.AppKey[Scraper | None] = web.AppKey("scraper")
REGISTRY: web.AppKey[RegistryReader | NoRegistry] = web.AppKey("registry")
TELLING = web.AppKey("telling", Telling)
"""Who listens to it hears of each request to a pod that publishes nothing, from here or from another gateway."""
SHARING: web.AppKey[Sharing | NoSharing] = web.AppKey("sharing")
EVENTS = web.AppKey("events", EventFeed)
STREAMS = web.AppKey("streams", Streams)
STATUS = web.AppKey("status", Status)
CHOOSER = web.AppKey("chooser", Chooser)
GENERATE = web.AppKey("generate", Generate)
ADMIN = web.AppKey("admin", Admin)
UPSTREAM = web.AppKey("upstream", UpstreamHeaders)
DOOR = web.AppKey("door", Door)
ROOM = web.AppKey("room", WaitingRoom)
DIED: web.AppKey[asyncio.Future[str]] = web.AppKey("died")
LACKS = web.AppKey("lacks", Lacks)
CLIENT_KEYS = web.AppKey("client_keys", ClientKeys)
ISOLATION = web.AppKey("isolation", Isolation)
LIMITER = web.AppKey("limiter", Limiter)
USAGE_LOG: web.AppKey[UsageLog | None] = web.AppKey("usage_log")


def build_app(settings: GatewaySettings) -> web.Application:
    """The application, not started. What needs a running loop is made by the contexts, in this order."""
    metrics, client_keys = Metrics(), ClientKeys()

    def refused(error: Unauthorized) -> None:
        metrics.unauthorized()
        if isinstance(error, ExpiredKey):
            metrics.tenants.refused(error.tenant.name, "expired")

    guards = [require_key(client_keys, refused)] if settings.has_client_keys else []
    app = web.Application(middlewares=[errors, refuse_extra, *guards], client_max_size=settings.max_body_bytes)
    app[SETTINGS] = settings
    app[METRICS], app[CLIENT_KEYS] = metrics, client_keys
    app[ISOLATION] = Isolation()
    has_engine_keys = bool(settings.engine_api_key_file or settings.engine_key_files)
    app[UPSTREAM] = UpstreamHeaders(passes_authorization=not (settings.has_client_keys or has_engine_keys))
    app[INDEX] = PrefixIndex()
    app[LACKS] = Lacks()
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    app[DOOR] = Door(
        DoorLimits(
            max_connections=most_connections(settings.max_connections, descriptors),
            descriptors=descriptors,
            head_s=settings.head_timeout_s,
            idle_s=settings.keepalive_timeout_s,
            write_s=settings.idle_timeout_s,
            dropped_bytes=max(settings.max_body_bytes, LEAST_DROPPED_BYTES),
        ),
        app[LACKS],
    )
    app[ADMISSION] = Admission(
        settings.max_in_flight, settings.max_in_flight_body_bytes, settings.max_in_flight_answer_bytes
    )
    app.cleanup_ctx.extend(
        (_supervision, _usage_log, _limiter, _keys, _clients, _fleet, _registry, _events, _handlers, _background)
    )
    app.on_response_prepare.append(_leave_when_draining)
    for endpoint in Endpoint:
        app.router.add_post(endpoint, _to(GENERATE, Generate.handle), expect_handler=no_go_ahead)
    app.router.add_get("/v1/models", _to(STATUS, Status.models))
    app.router.add_get("/v1/models/{model:.+}", _to(STATUS, Status.model))
    app.router.add_get("/health", _to(STATUS, Status.health))
    app.router.add_get("/ready", _to(STATUS, Status.ready))
    return app


async def _leave_when_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Let kept connections end with their next answer: one left idle would meet a client's next request."""
    if request.app[ADMISSION].is_draining:
        response.force_close()
        response.headers["Connection"] = "close"


def _to(
    key: web.AppKey[T], method: Callable[[T, web.Request], Awaitable[web.StreamResponse]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that calls a method of an object of the application, which exists once the application has started."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await method(request.app[key], request)

    return handle


# -- contexts: each makes one thing, yields, and ends it; ended in reverse order -------------------------------------


async def _supervision(app: web.Application) -> AsyncIterator[None]:
    app[DIED] = asyncio.get_running_loop().create_future()
    yield


async def _usage_log(app: web.Application) -> AsyncIterator[None]:
    """What tenants have used, written to its end when the last request has ended."""
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


async def _keys(app: web.Application) -> AsyncIterator[None]:
    """Who the tenants are, and the keys of clients and of the engines: read before anything is served, and followed."""
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
    """Connections to the engines. Their number is bounded by the requests in flight; nothing queues for one."""
    settings = app[SETTINGS]
    context: ssl.SSLContext | None = None
    certificate: Certificate | None = None
    if settings.has_engine_tls or any(url.startswith("https:") for url in settings.engines):
        context = engine_context(settings.engine_tls_ca_file, settings.engine_tls_server_name)
        if settings.engine_tls_cert_file and settings.engine_tls_key_file:
            certificate = Certificate(context, settings.engine_tls_cert_file, settings.engine_tls_key_file)
    app[ENGINES] = engines = EngineClient(context, settings.connect_timeout_s)
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context or True, limit=0, keepalive_timeout=PROBES_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
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
    settings = app[SETTINGS]
    discovery = make_discovery(settings)
    app[DISCOVERY] = OverTls(discovery) if settings.has_engine_tls else discovery
    app[FLEET] = Fleet(
        app[DISCOVERY],
        HttpProbe(
            app[SESSION],
            settings.probe_timeout_s,
            lambda url: app[UPSTREAM].credentials_of(app[FLEET].key_of(url)),
            app[LACKS],
            pods=lambda: app[FLEET].size,
        ),
        interval_s=settings.probe_interval_s,
        eject_after=settings.eject_after,
        expected=settings.models,
        ranks=settings.engine_ranks,
    )
    app[SCRAPER] = None
    if settings.engine_metrics:
        app[SCRAPER] = Scraper(
            HttpFetch(app[SESSION], lambda url: app[UPSTREAM].credentials_of(app[FLEET].key_of(url)), app[LACKS]),
            app[FLEET],
            path=settings.engine_metrics_path,
            port=settings.engine_metrics_port,
        )

    def give_up(pod: Pod) -> None:
        """What a pod that sleeps has not begun to answer goes to another one, where there is one."""
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
            stride=settings.stride,
            lease_s=settings.lease_s,
            on_life=fleet.heard,
        )
        fleet.listen(lambda change: reader.set_pods(change.pods))
    yield


async def _events(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    app[EVENTS] = events = EventFeed(
        app[INDEX],
        stride=settings.stride,
        belief_ttl_s=settings.foreign_ttl_s,
        clock=asyncio.get_running_loop().time,
    )
    app[STREAMS] = Streams(events, topic=settings.kv_events_topic, bind=settings.kv_events_bind)
    yield


async def _handlers(app: web.Application) -> AsyncIterator[None]:
    settings, fleet, metrics, index = app[SETTINGS], app[FLEET], app[METRICS], app[INDEX]
    registry, sessions = WithEvents(app[REGISTRY], app[EVENTS]), Sessions(app[EVENTS])
    estimates = Estimates()
    options = PolicyOptions(hash_depth_strides=settings.hash_depth_strides, load_bound=settings.load_bound)
    reader = Reader(
        fleet,
        estimates,
        stride=settings.stride,
        default_policy=settings.policy,
        policies=frozenset(POLICY_NAMES) if settings.allow_policy_header else None,
        isolation=app[ISOLATION],
        engine_priority=ENGINE_PRIORITY_SIGNS[settings.engine_priority],
        wakes_models=settings.activation_timeout_s > 0,
    )

    shares = settings.redis_url is not None and settings.share_beliefs
    notebook = new_notebook(f"{socket.gethostname()}:{settings.port}", settings.stride) if shares else None
    app[TELLING] = telling = Telling(app[REGISTRY].reports, notebook, asyncio.get_running_loop().time)
    telling.listen(app[EVENTS].on_routed)

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
        telling=telling,
    )
    app[SHARING] = make_sharing(
        settings.redis_url, notebook, fleet.pod, chooser, telling, Learning(fleet, estimates, index), settings.stride
    )
    app[ROOM] = WaitingRoom(
        fleet,
        chooser,
        metrics,
        RoomLimits(
            settings.queue_timeout_s,
            settings.activation_timeout_s,
            LineLimits(settings.queue_requests, settings.queue_mib * MIB, settings.max_pod_requests),
        ),
    )
    limits = Limits(
        first_byte_s=settings.first_byte_timeout_s,
        idle_s=settings.idle_timeout_s,
        retries=settings.retries,
        tells_cache=settings.cache_headers,
        resumes=settings.resume_streams,
        hedge_after_s=settings.hedge_after_s,
    )
    bodies = BodyLimits(settings.body_timeout_s, settings.body_min_rate)
    proxy = Proxy(app[ENGINES], app[UPSTREAM], fleet, chooser, app[ROOM], metrics, limits, sessions)
    app[GENERATE] = Generate(
        app[ADMISSION],
        reader,
        chooser,
        proxy,
        metrics,
        RequestLog(),
        bodies,
        app[LACKS],
        app[LIMITER],
        Accounts(metrics.tenants, app[USAGE_LOG]) if settings.tenants_file or settings.usage_log else None,
        sessions,
        total_timeout_s=settings.total_timeout_s,
    )
    app[STATUS] = Status(
        app[DISCOVERY],
        fleet,
        registry,
        isinstance(app[REGISTRY], RegistryReader),
        app[ADMISSION],
        app[DOOR],
        app[LACKS],
        app[ROOM],
        metrics,
        app[LIMITER],
        app[USAGE_LOG],
        app[SHARING],
        app[STREAMS],
        app[SCRAPER],
    )
    app[ADMIN] = Admin(app[SESSION], app[UPSTREAM], fleet, app[ADMISSION], reader, chooser, index, app[EVENTS], bodies)
    yield


async def _background(app: web.Application) -> AsyncIterator[None]:
    """What goes on beside the requests: forgetting what is gone, and finding out when the gateway is warm."""
    index, metrics, registry, sharing, streams = app[INDEX], app[METRICS], app[REGISTRY], app[SHARING], app[STREAMS]

    def forget(change: FleetChange) -> None:
        metrics.keep_pods(change.pods)
        for pod in change.ended:
            streams.leave(pod)
            if not registry.reports(pod):  # the registry reader sees the end of a publishing pod's life by itself
                index.drop(pod)
                app[CHOOSER].tell_forgotten(pod, is_sure=False)
        if isinstance(sharing, Sharing):
            sharing.fleet_changed(change)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            index.sweep(SWEEP_KEYS)

    async def warm_up() -> None:
        await app[FLEET].wait_probed()
        loop, timeout_s = asyncio.get_running_loop(), app[SETTINGS].warm_timeout_s
        until_s = loop.time() + timeout_s
        if isinstance(registry, RegistryReader) and not await registry.wait_warm(timeout_s):
            log.warning("registry: not loaded within %g s; going on without it", timeout_s)
        if isinstance(sharing, Sharing) and not await sharing.reader.wait_warm(max(0.0, until_s - loop.time())):
            log.warning("gateways: what others know is not loaded within %g s; going on without it", timeout_s)
        app[STATUS].is_warm = True

    app[FLEET].listen(forget)
    app[FLEET].listen(lambda change: streams.set_sources(sources(app[FLEET].members(), app[SETTINGS])))
    async with contextlib.AsyncExitStack() as running:
        if isinstance(registry, RegistryReader):
            await running.enter_async_context(kept(app, "the registry", registry.run()))
            shares = ShareSync(app[SETTINGS].redis_url or "", app[CHOOSER].name, app[CHOOSER].shares)
            await running.enter_async_context(kept(app, "the exchange of shares", shares.run()))
        if isinstance(sharing, Sharing):
            running.push_async_callback(sharing.close)
            for name, work in await sharing.start():
                await running.enter_async_context(kept(app, name, work))
        await running.enter_async_context(kept(app, "following KV events", streams.run()))
        await running.enter_async_context(kept(app, "discovery", app[FLEET].run()))
        if (scraper := app[SCRAPER]) is not None:
            await running.enter_async_context(kept(app, "reading the engines' metrics", scraper.run()))
        await running.enter_async_context(kept(app, "the sweep of the index", sweep()))
        await running.enter_async_context(kept(app, "the watch over connections", app[DOOR].watch()))
        await running.enter_async_context(kept(app, "warming up", warm_up()))
        yield


@contextlib.asynccontextmanager
async def kept(app: web.Application, name: str, work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """`work` as a task while the block lasts. If it fails, the gateway ends: `serve` waits for the first to do so."""

    def look(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s died: the gateway stops", name, exc_info=error)
            app[ADMISSION].is_draining = True  # nothing may be sent to it any more
            if not app[DIED].done():
                app[DIED].set_result(f"{name} died: {type(error).__name__}: {error}")

    async with running_task(work) as task:
        task.add_done_callback(look)
        yield
