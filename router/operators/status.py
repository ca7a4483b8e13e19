"""Report the state of the gateway and its fleet: health, readiness, metrics, models, pods."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Metric

from engine.contract.errors import BadRequest, quoted
from router.choosing.peer_setup import PeerSyncView
from router.choosing.registry_view import RegistryView
from router.edge.admission import Admission
from router.edge.client_keys import tenant_of
from router.edge.connection_limits import Door
from router.events.follow import Streams
from router.fleet.discovery import Discovery, DiscoveryStatus
from router.fleet.fleet import Fleet
from router.fleet.lack import Lacks
from router.fleet.member import Member
from router.fleet.pod import Pod
from router.fleet.scrape import Scraper
from router.forwarding.waiting import WaitingRoom
from router.kubernetes.inference_objectives import Objectives
from router.peer_sync.reader import PeerSyncStatus
from router.reading.inbound import check_allowed, find_model
from router.reading.names import Names
from router.telemetry.inference import InferenceValues
from router.telemetry.metrics import GaugeValues, Metrics
from router.telemetry.peer_sync import PeerSyncValues
from router.tenants.limiter import Limiter
from router.tenants.usage_log import UsageLog
from router.views.types import PodId

MAX_COUNT_DIGITS = 6


class Status:
    """Handlers that read state and change none. `is_warm`: set once the registry is loaded or given up."""

    def __init__(
        self,
        discovery: Discovery,
        fleet: Fleet,
        registry: RegistryView,
        has_registry: bool,
        admission: Admission,
        door: Door,
        lacks: Lacks,
        room: WaitingRoom,
        metrics: Metrics,
        limiter: Limiter,
        usage_log: UsageLog | None,
        peer_sync: PeerSyncView,
        events: Streams,
        scraper: Scraper | None = None,
        names: Names | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self._objectives = objectives
        self._names = names or Names()
        self._scraper = scraper
        self._discovery = discovery
        self._fleet = fleet
        self._registry = registry
        self._admission = admission
        self._door = door
        self._lacks = lacks
        self._room = room
        self._metrics = metrics
        self._limiter = limiter
        self._usage_log = usage_log
        self._peer_sync = peer_sync
        self._events = events
        self._has_registry = has_registry
        self.is_warm = not self._has_registry
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while the process lives."""
        return json_response({"status": "ok"})

    def missing(self) -> list[str]:
        """Return descriptions of what the gateway still needs before it can route; empty if it is ready."""
        discovery = self._discovery.status()
        missing = []
        if self._admission.is_draining:
            missing.append("the gateway is shutting down")
        if discovery.synced_at_s is None:
            missing.append(f"the engines are not known yet{f': {discovery.problem}' if discovery.problem else ''}")
        elif not self._fleet.is_probed:
            missing.append("the engines have not been asked yet")
        elif self._scraper is not None and not self._scraper.knows_ranks:
            missing.append("the engines have not been asked for their data-parallel ranks yet")
        if not self.is_warm:
            missing.append("the registry is being loaded")
        return missing

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 once the gateway knows what it needs to route; the body says what is missing.

        A gateway is ready even without engines, since clients get an error for that, and even if Redis fails.
        `?engines=N`: see `_few`.
        """
        discovery = self._discovery.status()
        admitted = len(self._fleet.admitted())
        missing = self.missing()
        missing += _few(request.query.get("engines"), admitted)
        detail = {
            "ready": not missing,
            "missing": missing,
            "pods": {"known": len(self._fleet.members()), "admitted": admitted, "ejected": self._ejected()},
            "discovery": {
                "synced": discovery.synced_at_s is not None,
                "sync_age_s": round(self._sync_age_s(discovery), 3),
                "errors": discovery.errors,
                "problem": discovery.problem,
                "pool_valid": discovery.is_pool_valid,
            },
            "objectives": _objective_facts(self._objectives),
            "registry": {"configured": self._has_registry, **asdict(self._registry.status())},
            "sharing": _few_facts(self._peer_sync.status()),
        }
        return json_response(detail, status=503 if missing else 200)

    def _ejected(self) -> int:
        """Number of pods that are ejected for failed requests although their probes succeed."""
        return sum(pod.faults.is_ejected for pod in self._fleet.answering())

    def _sync_age_s(self, discovery: DiscoveryStatus) -> float:
        """Seconds since the set of engines was last known to be complete; since the start if it never was."""
        since_s = self._started_s if discovery.synced_at_s is None else discovery.synced_at_s
        return max(0.0, self._clock() - since_s)

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer with the metrics as Prometheus text."""
        text = self._metrics.render(self._gauge_values())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def families(self) -> list[Metric]:
        """Return the metrics, for another format."""
        return self._metrics.families(self._gauge_values())

    def _gauge_values(self) -> GaugeValues:
        status = self._registry.status()
        discovery = self._discovery.status()
        members = [(member, member.pod) for member in self._fleet.members() if member.pod is not None]
        pods = [pod for member, _ in members for pod in member.pods]
        return GaugeValues(
            in_flight=self._admission.in_flight,
            answer_bytes=self._admission.answer_bytes,
            body_bytes=self._admission.body_bytes,
            connections=len(self._door.connections),
            connections_refused=self._door.refused,
            lacks=self._lacks.counts,
            pods_known=len(members),
            pods_admitted=len(self._fleet.admitted()),
            engine_in_flight={pod.pod_id: pod.in_flight for pod in pods},
            engine_ejected={pod.pod_id: pod.faults.is_ejected for pod in pods},
            metrics_pauses_s={
                pod.identity.pod_id: reading.every_s
                for member, pod in members
                if self._scraper is not None and (reading := self._scraper.status(member.url)) is not None
            },
            metrics_reads={} if self._scraper is None else self._scraper.counts,
            ejections=self._fleet.ejections,
            model_waiting=self._room.waiting(),
            model_engines=self._fleet.engines_by_model(),
            discovery_synced=discovery.synced_at_s is not None,
            discovery_sync_age_seconds=self._sync_age_s(discovery),
            discovery_errors=discovery.errors,
            discovery_relists=discovery.relists,
            inference=InferenceValues(
                discovery.is_pool_valid, None if self._objectives is None else len(self._objectives)
            ),
            registry_configured=self._has_registry,
            registry_connected=status.connected,
            registry_expired=status.expired,
            registry_pods_synced=status.pods_synced,
            registry_refused=status.refused,
            limits_alone=self._limiter.is_alone,
            usage_log_pending_bytes=self._usage_log.pending_bytes if self._usage_log else 0,
            usage_log_lost=self._usage_log.lost if self._usage_log else 0,
            registry_unknown=status.unknown,
            beliefs=self._belief_values(),
            kv_event_streams=Counter(self._events.states().values()),
            kv_events=self._events.totals(),
        )

    def _belief_values(self) -> PeerSyncValues:
        status = self._peer_sync.status()
        return PeerSyncValues(
            gateways=len(status.gateways),
            connected=status.connected,
            engines=status.pods,
            in_flight=sum(other.in_flight for other in status.gateways),
            waiting=status.waiting,
            lag_seconds=status.lag_s,
            sent=status.sent,
            sent_bytes=status.sent_bytes,
            written=status.written,
            heard=status.heard,
            refused=status.refused,
            unknown=status.unknown,
            lost=status.lost,
            gaps=status.gaps,
        )

    async def models(self, request: web.Request) -> web.Response:
        """Answer with the models of all pods and the operator's names that the tenant may use, each model as its first
        pod describes it."""
        models, tenant = self._fleet.models(), tenant_of(request)
        cards = {name: models[name].card for name in models if tenant.may_use(name)}
        cards |= self._names.cards(models, tenant)
        return json_response({"object": "list", "data": [orjson.Fragment(cards[name]) for name in sorted(cards)]})

    async def model(self, request: web.Request) -> web.Response:
        """Answer with one model, as in the list. Raises Forbidden, ModelNotFound or Unavailable."""
        name, tenant = request.match_info["model"], tenant_of(request)
        check_allowed(tenant, name)
        if name in self._names:
            card = self._names.cards(self._fleet.models(), tenant).get(name)
            if card is None:
                name = self._names.model(name, tenant, lambda model: False, b"")  # raises: it is not served
            else:
                return json_response(orjson.Fragment(card))
        return json_response(orjson.Fragment(find_model(self._fleet, name, tenant).card))

    async def pods(self, request: web.Request) -> web.Response:
        """Answer with every engine that discovery found, each data-parallel rank by itself: its identity, whether it
        takes requests, its load as the policies see it, and what the other gateways report on it.

        An engine takes requests if discovery calls it `ready`, the probe has `admitted` it, and it is neither `ejected`
        for failing requests nor `leaving`.
        """
        now_s = self._clock()
        elsewhere = self._peer_sync.in_flight()
        shown = [
            self._pod(member, pod, elsewhere, now_s)
            for member in self._fleet.members()
            for pod in member.pods or (None,)
        ]
        return json_response({"pods": shown, "sharing": asdict(self._peer_sync.status())})

    def _pod(self, member: Member, pod: Pod | None, elsewhere: Counter[PodId], now_s: float) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "url": member.url,
            "pod": pod.pod_id if pod else None,
            "ready": member.address.is_ready,
            "admitted": member.admitted,
            "failures": member.failures,
            "last_error": member.last_error,
        }
        if pod is not None:
            shown |= {
                "epoch": None if pod.epoch is None else str(pod.epoch),
                "models": [model.name for model in pod.identity.models],
                "in_flight": pod.in_flight,
                "in_flight_of_others": elsewhere[pod.pod_id],
                "ejected": pod.faults.is_ejected,
                "leaving": pod.faults.is_leaving,
                "failed_in_a_row": pod.faults.count,
                "weight": pod.weight,
                "publishes": self._registry.reports(pod.pod_id),
                "kv_events": self._events.status(pod.pod_id),
                "engine": {**asdict(pod.facts), "adapters": sorted(pod.facts.adapters)},
                "adapters_loaded": pod.adapters.loaded,
                "metrics": self._scraper and self._scraper.status(member.url),
                "load": asdict(pod.state.view(pod.pod_id, now_s=now_s)),
            }
        return shown


def _objective_facts(objectives: Objectives | None) -> dict[str, Any] | None:
    """Return facts about the objectives; None if none are followed."""
    return None if objectives is None else {"known": len(objectives), "problem": objectives.status().problem}


def _few_facts(status: PeerSyncStatus) -> dict[str, Any]:
    """Return the facts without names, since anybody may ask whether the gateway is ready."""
    return {
        "sharing": status.sharing,
        "connected": status.connected,
        "gateways": len(status.gateways),
        "last_error": status.last_error,
    }


def _few(wanted: str | None, admitted: int) -> list[str]:
    """Return what is missing for a caller that waits for `wanted` engines. Raises BadRequest if that is no number."""
    if wanted is None:
        return []
    if not wanted.isdecimal() or len(wanted) > MAX_COUNT_DIGITS:
        raise BadRequest(f"engines must be a number, got {quoted(wanted)}", param="engines")
    return [] if admitted >= int(wanted) else [f"{admitted} of {wanted} engines answer"]


def json_response(value: object, status: int = 200) -> web.Response:
    """Return `value` as a JSON response."""
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
