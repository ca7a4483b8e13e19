"""Find the source of each pod's KV events: the engine's own report, else the pod's annotations, else the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from router.events.follow import Source
from router.fleet.discovery import EngineAddress
from router.fleet.member import Member
from router.fleet.pod import Pod
from router.settings.gateway import GatewaySettings
from router.views.types import PodId


def sources(members: Iterable[Member], settings: GatewaySettings) -> Mapping[PodId, Source]:
    """Return the source of every identified pod that is known to publish KV events.

    An engine with several ranks behind one target is left out: a request cannot choose the rank that has a block.
    """
    found: dict[PodId, Source] = {}
    for member in members:
        for pod in member.pods:
            if pod.epoch is None and (source := _source(pod, member.address, settings)) is not None:
                found[pod.pod_id] = source  # our own engines report to the registry instead
    return found


def _source(pod: Pod, address: EngineAddress, settings: GatewaySettings) -> Source | None:
    facts, rank = pod.facts, pod.facts.rank or 0
    if (facts.ranks or 1) > 1 and facts.rank is None:
        return None
    port = _at(facts.kv_event_ports, rank)
    if port is None:
        port = _plus(address.kv_events_port or settings.kv_events_port or None, rank)
    replay_port = _at(facts.kv_replay_ports, rank)
    if replay_port is None:
        replay_port = _plus(address.kv_replay_port or settings.kv_events_replay_port or None, rank)
    url = urlsplit(pod.url)
    if (port is None and settings.kv_events_bind is None) or url.hostname is None:
        return None
    http_port = url.port or (443 if url.scheme == "https" else 80)
    if settings.kv_events_bind is not None:
        port = None
    return Source(pod.model, url.hostname, http_port, port, replay_port, address.life)


def _at(ports: tuple[int | None, ...], rank: int) -> int | None:
    return ports[rank] if rank < len(ports) else None


def _plus(port: int | None, rank: int) -> int | None:
    return None if port is None or port + rank > 65535 else port + rank
