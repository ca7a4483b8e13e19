"""The gateway's parts, as keys of the application: the maker of a part and its users need not know each other."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from router.choosing.chooser import Chooser
from router.choosing.peer_setup import NoPeerSync, PeerSync
from router.choosing.registry_view import NoRegistry
from router.edge.admission import Admission
from router.edge.client_keys import ClientKeys
from router.edge.connection_limits import ClientConnections
from router.edge.headers import UpstreamHeaders
from router.endpoints.generate import Generate
from router.endpoints.stored_responses import Stored
from router.engines.engine_client import EngineClient
from router.events.feed import EventFeed
from router.events.follow import Streams
from router.fleet.discovery import Discovery
from router.fleet.fetch import HttpFetch
from router.fleet.fleet import Fleet
from router.fleet.lack import Lacks
from router.fleet.scrape import Scraper
from router.forwarding.recorder import Recorder
from router.forwarding.waiting import WaitingRoom
from router.kubernetes.inference_objectives import Objectives
from router.operators.explain import Explain
from router.operators.exposition import Exposition
from router.operators.model_list import ModelList
from router.operators.pod_list import PodList
from router.operators.readiness import Readiness
from router.operators.resets import Resets
from router.peer_sync.sent_reports import SentReports
from router.picker.parts import PickerParts
from router.reading.names import Names
from router.reading.reader_process import BodyReader
from router.registry.index import PrefixIndex
from router.registry.reader import RegistryReader
from router.settings.constants import Constants
from router.settings.gateway import GatewaySettings
from router.stored.cache_store import CacheStore
from router.stored.named_caches import NamedCaches
from router.stored.places import Places
from router.telemetry.metrics import Metrics
from router.tenants.isolation import Isolation
from router.tenants.limiter import Limiter
from router.tenants.usage_log import UsageLog

SETTINGS = web.AppKey("settings", GatewaySettings)
CONSTANTS = web.AppKey("constants", Constants)
METRICS = web.AppKey("metrics", Metrics)
INDEX = web.AppKey("index", PrefixIndex)
ADMISSION = web.AppKey("admission", Admission)
SESSION = web.AppKey("session", aiohttp.ClientSession)
"""For probes and administration."""
ENGINES = web.AppKey("engines", EngineClient)
DISCOVERY: web.AppKey[Discovery] = web.AppKey("discovery")
FLEET = web.AppKey("fleet", Fleet)
FETCH = web.AppKey("fetch", HttpFetch)
OBJECTIVES: web.AppKey[Objectives | None] = web.AppKey("objectives")
SCRAPER: web.AppKey[Scraper | None] = web.AppKey("scraper")
REGISTRY: web.AppKey[RegistryReader | NoRegistry] = web.AppKey("registry")
PLACES = web.AppKey("places", Places)
SENT_REPORTS = web.AppKey("sent_reports", SentReports)
"""A listener hears of each request to a pod that publishes nothing, from this gateway or another one."""
PEER_SYNC: web.AppKey[PeerSync | NoPeerSync] = web.AppKey("peer_sync")
EVENTS = web.AppKey("events", EventFeed)
STREAMS = web.AppKey("streams", Streams)
READINESS = web.AppKey("readiness", Readiness)
EXPOSITION = web.AppKey("exposition", Exposition)
MODEL_LIST = web.AppKey("model_list", ModelList)
POD_LIST = web.AppKey("pod_list", PodList)
CHOOSER = web.AppKey("chooser", Chooser)
GENERATE = web.AppKey("generate", Generate)
STORED = web.AppKey("stored", Stored)
RECORDER = web.AppKey("recorder", Recorder)
PICKER = web.AppKey("picker", PickerParts)
EXPLAIN = web.AppKey("explain", Explain)
RESETS = web.AppKey("resets", Resets)
UPSTREAM = web.AppKey("upstream", UpstreamHeaders)
CONNECTIONS = web.AppKey("connections", ClientConnections)
ROOM = web.AppKey("room", WaitingRoom)
DIED: web.AppKey[asyncio.Future[str]] = web.AppKey("died")
LACKS = web.AppKey("lacks", Lacks)
NAMES = web.AppKey("names", Names)
BODY_READER = web.AppKey("body_reader", BodyReader)
NAMED_CACHES = web.AppKey("named_caches", NamedCaches)
CACHE_STORE: web.AppKey[CacheStore] = web.AppKey("cache_store")
CLIENT_KEYS = web.AppKey("client_keys", ClientKeys)
ISOLATION = web.AppKey("isolation", Isolation)
LIMITER = web.AppKey("limiter", Limiter)
USAGE_LOG: web.AppKey[UsageLog | None] = web.AppKey("usage_log")
