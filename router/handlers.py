"""The way of a request put together: from its reader to the answers of status and administration."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Literal

from aiohttp import web

from router.gateway.accounts import Accounts
from router.gateway.admin import Admin
from router.gateway.admission import MIB
from router.gateway.body import BodyLimits
from router.gateway.chooser import Chooser
from router.gateway.conversations import Conversations
from router.gateway.estimates import Estimates
from router.gateway.generate import Generate
from router.gateway.inbound import Reader
from router.gateway.learning import Learning
from router.gateway.limits import Limits
from router.gateway.named_caches import NamedCaches
from router.gateway.proxy import Proxy
from router.gateway.reach import Reach
from router.gateway.registry import WithEvents
from router.gateway.sessions import Sessions
from router.gateway.shadow import Shadows
from router.gateway.sharing import make_sharing, new_notebook
from router.gateway.status import Status
from router.gateway.telling import Telling
from router.gateway.tracing import TRACER
from router.gateway.waiting import RoomLimits, WaitingRoom
from router.overload.line import LineLimits
from router.parts import (
    ADMIN,
    ADMISSION,
    CACHE_STORE,
    CHOOSER,
    DISCOVERY,
    DOOR,
    ENGINES,
    EVENTS,
    FLEET,
    GENERATE,
    INDEX,
    ISOLATION,
    LACKS,
    LIMITER,
    METRICS,
    NAMED_CACHES,
    NAMES,
    PLACES,
    REGISTRY,
    ROOM,
    SCRAPER,
    SESSION,
    SETTINGS,
    SHARING,
    STATUS,
    STREAMS,
    TELLING,
    UPSTREAM,
    USAGE_LOG,
)
from router.registry.reader import RegistryReader
from router.routing.policies import POLICY_NAMES, PolicyOptions, make_policy
from router.routing.types import Policy
from router.telemetry.log import RequestLog

ENGINE_PRIORITY_SIGNS: Mapping[str, Literal[-1, 1] | None] = {"none": None, "vllm": -1, "sglang": 1}
"""Of the body's field `priority`: vLLM takes the lowest first, SGLang the highest (unless it is told
--schedule-low-priority-values-first)."""


async def handlers(app: web.Application) -> AsyncIterator[None]:
    """Makes what reads requests, decides, sends them on and tells of it, of parts that exist already."""
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
        names=app[NAMES],
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
    clock = asyncio.get_running_loop().time
    reach, conversations = Reach(fleet, app[ROOM], clock), Conversations(fleet, app[PLACES])
    proxy = Proxy(
        *(app[ENGINES], app[UPSTREAM], fleet, chooser, app[ROOM], metrics, limits, sessions, reach, conversations)
    )
    app[NAMED_CACHES] = NamedCaches(
        app[CACHE_STORE],
        fleet,
        app[NAMES],
        estimates,
        app[ADMISSION],
        bodies,
        max_ttl_s=settings.named_cache_max_ttl_s,
        max_body_bytes=settings.max_body_bytes,
        is_enabled=settings.named_caches > 0,
    )
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
        conversations,
        app[NAMED_CACHES],
        app[TRACER],
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
        app[NAMES],
    )
    app[ADMIN] = Admin(app[SESSION], app[UPSTREAM], fleet, app[ADMISSION], reader, chooser, index, app[EVENTS], bodies)
    yield
