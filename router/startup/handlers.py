"""Assembles the path of a request, from its reader to the answers, and the handlers of status and administration."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from aiohttp import web

from router.choosing.chooser import Chooser, Knowledge
from router.choosing.learnt_values import LearntValues
from router.choosing.peer_setup import make_peer_sync, new_outbox
from router.choosing.registry_view import RegistryView, WithEvents
from router.choosing.shadow import Shadows
from router.edge.admission import MIB
from router.edge.body import BodyLimits
from router.edge.client_keys import counting_refusals
from router.endpoints.generate import Generate
from router.endpoints.intake import Reading, UploadLimits
from router.endpoints.stored_responses import Stored, StoredResponses
from router.fleet.vital_signs import VitalSigns
from router.forwarding.attempts import Attempts, Sessions
from router.forwarding.candidates import Candidates
from router.forwarding.conversations import Conversations
from router.forwarding.failure_accounting import FailureAccounting
from router.forwarding.hedge import Hedges
from router.forwarding.proxy import Proxy
from router.forwarding.recorder import Recorder, TenantAccounts
from router.forwarding.resuming import Resuming
from router.forwarding.sender import Limits, Sender
from router.forwarding.silence import Silence
from router.forwarding.tracing import TRACER
from router.forwarding.waiting import RoomLimits, WaitingRoom
from router.operators.explain import Explain
from router.operators.exposition import (
    Exposition,
    client_values,
    discovery_values,
    fleet_values,
    peer_sync_values,
    registry_values,
    tenant_values,
)
from router.operators.model_list import ModelList
from router.operators.pod_list import PodList
from router.operators.readiness import Readiness
from router.operators.resets import Resets
from router.overload.line import LineLimits
from router.peer_sync.sent_reports import SentReports
from router.picker.parts import PickerLimits, PickerParts
from router.reading.client_paths import MODEL, MODELS, Found
from router.reading.inbound import Reader
from router.reading.model_ratios import Estimates
from router.reading.names import Models
from router.registry.reader import RegistryReader
from router.routing.policies import POLICY_NAMES, PolicyOptions, make_policy
from router.startup.parts import (
    ADMISSION,
    CACHE_STORE,
    CHOOSER,
    CLIENT_KEYS,
    CONNECTIONS,
    CONSTANTS,
    DISCOVERY,
    ENGINES,
    EVENTS,
    EXPLAIN,
    EXPOSITION,
    FETCH,
    FLEET,
    GENERATE,
    INDEX,
    ISOLATION,
    LACKS,
    LIMITER,
    METRICS,
    MODEL_LIST,
    NAMED_CACHES,
    NAMES,
    OBJECTIVES,
    PEER_SYNC,
    PICKER,
    PLACES,
    POD_LIST,
    READINESS,
    RECORDER,
    REGISTRY,
    RESETS,
    ROOM,
    SCRAPER,
    SENT_REPORTS,
    SESSION,
    SETTINGS,
    STORED,
    STREAMS,
    UPSTREAM,
    USAGE_LOG,
)
from router.stored.named_caches import NamedCacheLimits, NamedCaches
from router.telemetry.inference import InferenceValues
from router.telemetry.log import RequestLog
from router.telemetry.metrics import ScrapedValues
from router.telemetry.registry import KvEventValues
from router.tenants.tenant import Tenant
from router.views.table import Policy

ENGINE_PRIORITY_SIGNS: Mapping[str, Literal[-1, 1] | None] = {"none": None, "vllm": -1, "sglang": 1}
"""Order of the body's field `priority`: vLLM takes the lowest first, SGLang the highest (unless it has
--schedule-low-priority-values-first)."""


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts on the way of a request that clients' handlers, operators' handlers and the picker share."""

    bodies: BodyLimits
    reading: Reading
    candidates: Candidates
    conversations: Conversations
    attempts: Attempts
    accounting: FailureAccounting
    stored: StoredResponses


async def handlers(app: web.Application) -> AsyncIterator[None]:
    """Make the parts that read requests, decide, send them on and report, from parts that exist already."""
    registry, estimates = WithEvents(app[REGISTRY], app[EVENTS]), Estimates()
    _deciding(app, registry, estimates)
    parts = _request_parts(app, estimates)
    _answering(app, parts)
    _reporting(app, registry)
    _picking(app, parts)
    _operating(app, parts)
    yield


def _deciding(app: web.Application, registry: RegistryView, estimates: Estimates) -> None:
    """Make the chooser, its exchange with other gateways, and the room in which requests wait for a pod."""
    settings, constants, fleet, metrics, index = app[SETTINGS], app[CONSTANTS], app[FLEET], app[METRICS], app[INDEX]
    options = PolicyOptions()
    stride = constants.stride_bytes
    outbox = new_outbox(f"{socket.gethostname()}:{settings.port}", stride) if settings.redis_url else None
    app[SENT_REPORTS] = sent_reports = SentReports(app[REGISTRY].reports, outbox, asyncio.get_running_loop().time)
    sent_reports.listen(app[EVENTS].on_routed)

    def make_policies() -> dict[str, Policy]:
        return {name: make_policy(name, options) for name in POLICY_NAMES}

    app[CHOOSER] = chooser = Chooser(
        Knowledge(fleet, index, registry, estimates),
        make_policies,
        metrics,
        constants,
        clock=asyncio.get_running_loop().time,
        shadows=Shadows(settings.shadow_policies, make_policies, metrics) if settings.shadow_policies else None,
        sent_reports=sent_reports,
    )
    app[PEER_SYNC] = make_peer_sync(
        settings.redis_url,
        outbox,
        fleet.pod,
        chooser,
        sent_reports,
        LearntValues(fleet, estimates, index),
    )
    app[ROOM] = WaitingRoom(
        fleet,
        chooser,
        metrics,
        RoomLimits(
            settings.queue_timeout_s,
            settings.activation_timeout_s,
            LineLimits(constants.queue_requests, constants.queue_mib * MIB, settings.max_pod_requests),
            settings.goals,
        ),
    )


def _request_parts(app: web.Application, estimates: Estimates) -> RequestParts:
    """Make what reads requests, names caches and records what became of requests; return it with what is shared."""
    settings, constants, fleet, chooser, metrics = app[SETTINGS], app[CONSTANTS], app[FLEET], app[CHOOSER], app[METRICS]
    sessions, conversations = (
        Sessions(app[EVENTS]),
        Conversations(fleet, app[PLACES], has_tenants=app[SETTINGS].tenants_file is not None),
    )
    bodies = BodyLimits(constants.body_timeout_s, constants.body_min_rate)
    reader = Reader(
        Models(fleet, app[NAMES], wakes_models=settings.activation_timeout_s > 0),
        estimates,
        stride=constants.stride_bytes,
        default_policy=settings.policy,
        policies=frozenset(POLICY_NAMES) if settings.allow_policy_header else None,
        isolation=app[ISOLATION],
        engine_priority=ENGINE_PRIORITY_SIGNS[settings.engine_priority],
    )
    app[NAMED_CACHES] = NamedCaches(
        app[CACHE_STORE],
        fleet,
        app[NAMES],
        estimates,
        app[ADMISSION],
        bodies,
        NamedCacheLimits(constants.named_cache_max_ttl_s, settings.max_body_bytes, settings.named_caches > 0),
    )
    app[RECORDER] = Recorder(
        chooser,
        metrics,
        RequestLog(),
        app[LACKS],
        TenantAccounts(metrics.tenants, app[USAGE_LOG]) if settings.tenants_file or settings.usage_log else None,
        sessions,
        conversations,
        app[TRACER],
    )
    uploads = UploadLimits(settings.max_body_bytes, constants.max_upload_mib * MIB)
    return RequestParts(
        bodies,
        Reading(reader, app[NAMED_CACHES], conversations, bodies, uploads),
        Candidates(fleet, app[ROOM], chooser, asyncio.get_running_loop().time),
        conversations,
        Attempts(fleet, chooser, sessions),
        FailureAccounting(fleet, chooser, metrics),
        StoredResponses(fleet, app[PLACES], settings.policy),
    )


def _answering(app: web.Application, parts: RequestParts) -> None:
    """Make the handlers that send requests on and pass the answers back."""
    settings, constants, fleet, chooser, metrics = app[SETTINGS], app[CONSTANTS], app[FLEET], app[CHOOSER], app[METRICS]
    attempts, candidates, accounting = parts.attempts, parts.candidates, parts.accounting
    limits = Limits(
        first_byte_s=settings.first_byte_timeout_s,
        idle_s=settings.idle_timeout_s,
        retries=constants.retries,
        tells_cache=settings.cache_headers,
        resumes=settings.resume_streams,
        hedge_after_s=settings.hedge_after_s,
    )
    silence = Silence(VitalSigns(app[FETCH], settings.engine_metrics_port), limits.idle_s)
    conversations = parts.conversations
    sender = Sender(app[ENGINES], app[UPSTREAM], candidates, accounting, conversations, metrics, limits, silence)
    resuming = Resuming(fleet, chooser, attempts, sender, candidates, accounting, metrics, limits)
    hedges = Hedges(limits.hedge_after_s, fleet, chooser, app[ROOM], metrics) if limits.hedge_after_s else None
    proxy = Proxy(candidates, attempts, sender, resuming, accounting, hedges, limits)
    app[GENERATE] = Generate(
        admission=app[ADMISSION],
        reading=parts.reading,
        proxy=proxy,
        limiter=app[LIMITER],
        recorder=app[RECORDER],
        tracer=app[TRACER],
        total_timeout_s=settings.total_timeout_s,
    )
    app[STORED] = Stored(app[ADMISSION], parts.stored, proxy, app[RECORDER], settings.total_timeout_s)


def _picking(app: web.Application, parts: RequestParts) -> None:
    """Make what the endpoint picker of other proxies needs."""
    settings, constants, metrics = app[SETTINGS], app[CONSTANTS], app[METRICS]
    app[PICKER] = PickerParts(
        admission=app[ADMISSION],
        reading=parts.reading,
        candidates=parts.candidates,
        conversations=parts.conversations,
        fleet=app[FLEET],
        room=app[ROOM],
        chooser=app[CHOOSER],
        attempts=parts.attempts,
        accounting=parts.accounting,
        recorder=app[RECORDER],
        limiter=app[LIMITER],
        upstream=app[UPSTREAM],
        metrics=metrics,
        tracer=app[TRACER],
        keys=app[CLIENT_KEYS] if settings.has_client_keys else None,
        on_refusal=counting_refusals(metrics),
        stored=parts.stored,
        own=partial(_own_answer, app[MODEL_LIST], app[READINESS]),
        limits=PickerLimits(
            max_body_bytes=settings.max_body_bytes,
            body_s=constants.body_timeout_s,
            total_s=settings.total_timeout_s,
            fallbacks=settings.ext_proc_fallbacks,
            tells_cache=settings.cache_headers,
            passes_through=settings.pass_through,
            takes_tests=settings.allow_policy_header,
            has_tenants=settings.tenants_file is not None,
        ),
        objectives=app[OBJECTIVES],
    )


def _own_answer(models: ModelList, readiness: Readiness, found: Found, tenant: Tenant) -> web.Response:
    """Return the gateway's own answer to a client of the picker. Raises ApiError."""
    if found.pattern == MODELS:
        return models.listed(tenant)
    if found.pattern == MODEL:
        return models.one(found.name, tenant)
    return readiness.public() if found.pattern == "/ready" else readiness.alive()


def _operating(app: web.Application, parts: RequestParts) -> None:
    """Make the operators' handlers."""
    app[EXPLAIN] = Explain(app[ADMISSION], parts.reading, app[CHOOSER], parts.bodies, app[CLIENT_KEYS])
    app[RESETS] = Resets(app[SESSION], app[UPSTREAM], app[FLEET], app[CHOOSER], app[INDEX], app[EVENTS])


def _reporting(app: web.Application, registry: RegistryView) -> None:
    """Make the handlers that report the state of the gateway and its fleet."""
    fleet, discovery, objectives = app[FLEET], app[DISCOVERY], app[OBJECTIVES]
    has_registry = isinstance(app[REGISTRY], RegistryReader)
    app[READINESS] = readiness = Readiness(
        discovery,
        fleet,
        app[ADMISSION],
        registry,
        has_registry=has_registry,
        peer_sync=app[PEER_SYNC],
        scraper=app[SCRAPER],
        objectives=objectives,
    )
    app[MODEL_LIST] = ModelList(fleet, app[NAMES])
    app[POD_LIST] = PodList(fleet, registry, app[PEER_SYNC], app[STREAMS], app[SCRAPER])

    def read() -> ScrapedValues:
        found = discovery.status()
        return ScrapedValues(
            clients=client_values(app[ADMISSION], app[CONNECTIONS], app[LACKS]),
            fleet=fleet_values(fleet, app[SCRAPER]),
            discovery=discovery_values(found, readiness.sync_age_s()),
            registry=registry_values(registry.status(), is_configured=has_registry),
            waiting=app[ROOM].waiting(),
            kv_events=KvEventValues(Counter(app[STREAMS].states().values()), app[STREAMS].totals()),
            peer_sync=peer_sync_values(app[PEER_SYNC].status()),
            tenants=tenant_values(app[LIMITER], app[USAGE_LOG]),
            inference=InferenceValues(found.is_pool_valid, None if objectives is None else len(objectives)),
        )

    app[EXPOSITION] = Exposition(app[METRICS], read)
