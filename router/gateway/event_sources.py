"""Where the KV events of each pod come from: what the engine tells, else its pod's annotations, else the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from router.config import GatewaySettings
from router.events.follow import Source
from router.fleet.member import Member
from router.routing.types import PodId


def sources(members: Iterable[Member], settings: GatewaySettings) -> Mapping[PodId, Source]:
    """Of every identified pod that publishes KV events, as far as is known.

    An engine of several ranks that are one target here is left out: which of them holds a block would not help.
    """
    found: dict[PodId, Source] = {}
    for member in members:
        pod = member.pod
        if pod is None or not settings.kv_events or pod.epoch is not None:  # our own engine has the registry
            continue
        facts, address = pod.facts, member.address
        rank = facts.rank or 0
        if (facts.ranks or 1) > 1 and facts.rank is None:
            continue
        port = _at(facts.kv_event_ports, rank)
        if port is None:
            port = _plus(address.kv_events_port or settings.kv_events_port or None, rank)
        replay_port = _at(facts.kv_replay_ports, rank)
        if replay_port is None:
            replay_port = _plus(address.kv_replay_port or settings.kv_events_replay_port or None, rank)
        url = urlsplit(pod.url)
        if (port is None and settings.kv_events_bind is None) or url.hostname is None:
            continue
        http_port = url.port or (443 if url.scheme == "https" else 80)
        if settings.kv_events_bind is not None:
            port = None
        found[pod.pod_id] = Source(pod.model, url.hostname, http_port, port, replay_port, address.life)
    return found


def _at(ports: tuple[int, ...], rank: int) -> int | None:
    return ports[rank] if rank < len(ports) else None


def _plus(port: int | None, rank: int) -> int | None:
    return None if port is None or port + rank > 65535 else port + rank
